"""Every configuration key, declared once. Experiments change a few of them.

A config file is `base.get_config()` and the lines that differ. Keys of named
constructors (task, algorithm, optimizer) are typed placeholders: unset means
the constructor's own default, and a key it does not have is refused.
"""

from ml_collections import config_dict

unset = config_dict.placeholder


def get_config() -> config_dict.ConfigDict:
  """The defaults. Locked: a misspelt key is an error."""
  c = config_dict.ConfigDict()
  c.seed = 0  # of initialisation, data order and sampling
  c.steps = 100  # steps of reinforcement learning, after the warm-up
  c.init_from = ""  # RUN@STEP: parameters of another run; then no warm-up
  c.platform = (
    ""  # cpu, gpu or tpu is asserted at start; '' takes what is there
  )
  c.compile_cache = "~/.cache/grpo_jax"  # compiled programs on disk; '' none
  c.profile = ""  # steps to write a trace of, such as 10-12
  c.tokenizer = ""  # byte; '' is the model's own, or byte from scratch

  c.mesh = config_dict.ConfigDict()
  c.mesh.data = -1  # replicas; -1 takes the devices that the others leave
  c.mesh.fsdp = 1  # ways the parameters are split, gathered where used
  c.mesh.tensor = 1  # ways heads, feed-forward and vocabulary are split
  c.mesh.replicate_kv = False  # keep kv heads whole where tensor is larger

  c.task = config_dict.ConfigDict()
  c.task.name = "words"
  c.task.kind = unset(str)  # words: reverse or sort
  c.task.min_letters = unset(int)
  c.task.max_letters = unset(int)
  c.task.teacher_accuracy = unset(float)  # of demonstrations
  c.task.dataset = unset(str)  # reasoning_gym: its data set's name
  c.task.options = unset(str)  # its options, a JSON object
  c.task.mixture = unset(str)  # or several: a JSON list of {"dataset": …,
  # "options": {…}, "weight": …}
  c.task.size = unset(int)  # training questions to generate
  c.task.question_regex = unset(str)  # the part of its text that is asked
  c.task.success_from = unset(float)  # verifier's score that is a success
  c.task.train_path = unset(str)  # jsonl: the files
  c.task.tuning_path = unset(str)
  c.task.heldout_path = unset(str)
  c.task.tuning_fraction = unset(float)  # where only a training file is given
  c.task.heldout_fraction = unset(float)
  c.task.path = unset(str)  # datasets: hub id[@revision], directory or file
  c.task.configuration = unset(str)  # of that set, where it has several
  c.task.train_split = unset(str)  # its names of the splits
  c.task.tuning_split = unset(str)
  c.task.heldout_split = unset(str)
  c.task.unfit = unset(str)  # refuse or drop: unreadable or in two splits
  c.task.shots = unset(int)  # training questions before every prompt
  c.task.shots_seed = unset(int)
  c.task.prompt_field = unset(str)
  c.task.answer_field = unset(str)
  c.task.answer_from = unset(str)  # rule that reads the reference in it
  c.task.match = unset(str)  # exact, normalized, number or math
  c.task.grade = unset(str)  # strict or lenient: which of both is the reward
  c.task.tuning = unset(int)  # questions to choose settings by
  c.task.heldout = unset(int)  # questions to report on
  c.task.template = unset(str)  # with {question}; examples are part of it
  c.task.extract = unset(str)  # how the answer is read from a completion
  c.task.stop = unset(str)  # a one-token string that ends a completion

  c.reward = config_dict.ConfigDict()
  c.reward.time_limit = 10.0  # seconds to score one completion, or no score
  c.reward.workers = 0  # processes of cpu_bound rewards; 0: a core each

  c.data = config_dict.ConfigDict()
  c.data.max_prompt_tokens = 0  # the longest prompt; 0: as long as they come
  c.data.long_prompts = "refuse"  # or drop: those that are longer; never cut
  c.data.chat = False  # render prompts through the model's chat template
  c.data.system = ""  # the system message of that chat
  c.data.chat_options = ""  # variables of the template, a JSON object
  c.data.curriculum = "none"  # pass_rate: questions solved always or never rest
  c.data.rest_below = 0.5  # a question rests while its next group is less
  # likely than this to be mixed, judged by its own past; 0: none rests
  c.data.half_life = 8.0  # epochs in which that past is forgotten by half

  c.model = config_dict.ConfigDict()
  c.model.path = ""  # a directory, a GGUF file or a hub id[@revision] to start
  # from; the sizes below are then the model's own and are not read
  c.model.module = ""  # module:function of a network of one's own, see
  # grpo_jax/models/flax_module.py; the sizes are then its own
  c.model.layers = 2
  c.model.embed = 64
  c.model.heads = 4
  c.model.kv_heads = 4
  c.model.head_dim = 16
  c.model.ffn = 128
  c.model.tied = False  # the output head is the input table
  c.model.rope_theta = 10_000.0
  c.model.norm_eps = 1e-5
  c.model.dtype = "float32"  # of matrix products: float32 or bfloat16
  c.model.remat = False  # recompute layers in the backward pass
  c.model.logit_elements = 2**24  # most logits in memory at once

  c.lora = config_dict.ConfigDict()
  c.lora.rank = 0  # of the adapters that are trained; 0: all weights are
  c.lora.alpha = 32.0  # their scale is alpha / rank
  c.lora.targets = ".*"  # a pattern: attn/(q|k|v|o), mlp/(gate|up|down)
  c.lora.path = ""  # adapters in PEFT's format to start from, with their sizes

  c.batch = config_dict.ConfigDict()
  c.batch.prompts_per_step = 16  # the rollout batch, in prompts
  c.batch.prompts_per_update = 0  # a mini-batch: one optimizer step; 0: all
  c.batch.micro_batch_prompts = 0  # one gradient computation; 0: a mini-batch
  c.batch.epochs = 1  # passes over a rollout
  c.batch.slabs = 1  # parts a group is cut into by length, in the update
  c.batch.slab_lengths = 1  # lengths a part may have; all are compiled first

  c.sampling = config_dict.ConfigDict()
  c.sampling.group_size = 8  # G, completions per prompt
  c.sampling.max_tokens = 16  # T, the stop token included
  c.sampling.temperature = 1.0
  c.sampling.top_k = 0  # 0 keeps all
  c.sampling.top_p = 1.0
  c.sampling.min_p = 0.0
  c.sampling.max_support = 128  # ids kept at most under top_p or min_p
  c.sampling.early_exit = True  # stop when all rows have; False: T steps
  c.sampling.compact = 0  # smaller sizes that a batch shrinks to as rows end,
  # at most 5; each is compiled

  c.algorithm = config_dict.ConfigDict()
  c.algorithm.name = "grpo_sequence"
  # Arguments of the row's constructor:
  c.algorithm.beta = unset(float)  # coefficient of its KL to the reference
  c.algorithm.clip = unset(float)  # PPO's ε, where the row has one for both
  c.algorithm.clip_low = unset(float)
  c.algorithm.clip_high = unset(float)
  c.algorithm.ddof = unset(int)  # of the group's standard deviation
  c.algorithm.epsilon = unset(float)  # added to it
  c.algorithm.baseline = unset(str)  # reinforce: none, batch or group
  c.algorithm.gamma = unset(float)  # discount of rewards
  c.algorithm.lam = unset(float)  # λ of GAE, the policy's
  c.algorithm.critic_lam = unset(float)  # λ of GAE, the values'
  c.algorithm.alpha = unset(float)  # vapo: λ = 1 - 1/(α length)
  c.algorithm.value_clip = unset(float)
  c.algorithm.value_coefficient = unset(float)
  c.algorithm.critic_rate = unset(float)  # its learning rate over the policy's
  c.algorithm.shared = unset(bool)  # values from a head on the policy
  c.algorithm.pretrain_steps = unset(int)  # in which values alone learn
  c.algorithm.whiten = unset(bool)  # standardise advantages over the batch
  c.algorithm.tokens = unset(int)  # the constant that replaces lengths
  c.algorithm.average = unset(str)  # dapo: prompt or batch
  c.algorithm.rounds = unset(int)  # rollout batches to fill a step
  c.algorithm.bound = unset(float)  # gmpo, dppo
  c.algorithm.delta = unset(float)  # deepseek_v32: of the off-policy mask
  c.algorithm.positive = unset(float)  # sapo: τ where the advantage is above 0
  c.algorithm.negative = unset(float)
  c.algorithm.fraction = unset(float)  # clip_cov, kl_cov: of all tokens
  c.algorithm.coefficient = unset(float)  # kl_cov
  c.algorithm.refresh_every = unset(int)  # steps until a new reference
  # Around any row (grpo_jax/adjust.py):
  c.algorithm.kl_place = unset(str)  # none, loss or reward
  c.algorithm.kl_beta = unset(float)
  c.algorithm.kl_estimator = unset(str)  # k1, k2, k3 or exact
  c.algorithm.kl_sequence = unset(bool)
  c.algorithm.kl_ratio_weighted = unset(bool)
  c.algorithm.kl_target = unset(float)  # nats per token; β follows it
  c.algorithm.reference_every = unset(int)
  c.algorithm.reference_decay = unset(float)
  c.algorithm.entropy = unset(float)  # coefficient of the bonus
  c.algorithm.correction = unset(str)  # none, truncated, masked, banded
  c.algorithm.correction_level = unset(str)  # token, sequence, geometric
  c.algorithm.correction_low = unset(float)
  c.algorithm.correction_high = unset(float)
  c.algorithm.dual_clip = unset(float)
  c.algorithm.overlong = unset(str)  # none, mask or soft
  c.algorithm.overlong_cache = unset(int)  # tokens before the limit
  c.algorithm.dynamic_rounds = unset(int)  # 0: no dynamic sampling

  c.optimizer = config_dict.ConfigDict()
  c.optimizer.name = "adamw"
  c.optimizer.learning_rate = 1e-3
  c.optimizer.warmup_steps = 5  # steps of linear rise
  c.optimizer.decay = "linear"  # constant, linear or cosine
  c.optimizer.final_fraction = 0.1  # of the learning rate, in the last step
  c.optimizer.b1 = unset(float)
  c.optimizer.b2 = unset(float)
  c.optimizer.eps = unset(float)
  c.optimizer.weight_decay = unset(float)
  c.optimizer.clip_norm = unset(float)  # largest gradient norm; 0: no clip
  c.optimizer.momentum = unset(float)

  c.warmup = config_dict.ConfigDict()
  c.warmup.steps = 0  # steps of imitation before reinforcement learning
  c.warmup.prompts_per_step = 128
  c.warmup.learning_rate = 1e-3
  c.warmup.warmup_steps = 20
  c.warmup.decay = "cosine"
  c.warmup.final_fraction = 0.1

  c.eval = config_dict.ConfigDict()
  c.eval.every = 20  # steps; at the first and last step too; 0: never
  c.eval.split = "heldout"  # or tuning, to choose settings by
  c.eval.prompts = 256
  c.eval.samples = 1  # completions per prompt of eval/sampled
  c.eval.prompts_per_batch = 0  # 0: as many as batch.prompts_per_step
  c.eval.temperature = 1.0
  c.eval.top_k = 0
  c.eval.top_p = 1.0
  c.eval.max_tokens = 0  # 0: as in sampling

  c.checkpoint = config_dict.ConfigDict()
  c.checkpoint.every = 20  # steps; the end of a phase and of the run too
  c.checkpoint.keep_last = 2  # beside the best and the end of the warm-up
  c.checkpoint.wait = False  # end each save before the next step: less memory

  c.log = config_dict.ConfigDict()
  c.log.every = 10  # steps between lines where there is no terminal
  c.log.rollouts = True  # keep every rollout, text and numbers
  c.log.tensorboard = True
  return c.lock()

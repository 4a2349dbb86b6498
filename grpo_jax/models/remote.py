"""Models that lie elsewhere: an object store, or the hub."""

import fnmatch
import hashlib
import json
import os
import pathlib
import shutil

from grpo_jax.errors import UserError

CACHE = "~/.cache/grpo_jax/models"


def copy(url: str, patterns: tuple[str, ...]) -> str:
  """A local copy of a directory or file in an object store.

  A file whose key (what the store says of it: size, time, etag) is the one it
  was fetched with is not fetched again; one that was cut off, or replaced, is.
  What has gone at the source goes here.

  Args:
    url: gs://bucket/path, s3://…; any scheme that fsspec knows.
    patterns: names of the files to fetch.

  Returns:
    the path of the copy.

  Raises:
    UserError: nothing there, no access, or the scheme's package is missing.
  """
  try:
    import fsspec
  except ImportError as error:
    raise UserError(f"{url} needs fsspec: pip install -e '.[hf]'") from error
  try:
    files, root = fsspec.core.url_to_fs(url)
    found = _listing(files, root, patterns)
  except ImportError as error:  # says which package the scheme needs
    mend = " (pip install -e '.[gcs]')" if url.startswith("gs://") else ""
    raise UserError(f"{url} cannot be read: {error}{mend}") from error
  except Exception as error:  # every store has errors of its own
    raise UserError(f"{url} cannot be read: {_words(error)}") from error
  if not found:
    raise UserError(f"{url} holds no model: no file like {patterns[0]} there")
  folder = hashlib.sha256(url.encode()).hexdigest()[:16]
  out = pathlib.Path(os.path.expanduser(CACHE)) / folder
  known = out / "keys.json"
  keys = json.loads(known.read_text()) if known.exists() else {}
  for stale in out.glob("*"):
    if stale.name not in found and stale != known:
      stale.unlink()
  for name, (source, size) in found.items():
    target, key = out / name, str(files.ukey(source))
    whole = target.exists() and target.stat().st_size == size
    if whole and keys.get(name) == key:
      continue
    part = target.with_suffix(target.suffix + ".part")
    try:
      target.parent.mkdir(parents=True, exist_ok=True)
      with files.open(source, "rb") as there, part.open("wb") as here:
        shutil.copyfileobj(there, here, 16 * 2**20)
      part.replace(target)
      keys[name] = key
      known.write_text(json.dumps(keys))
    except Exception as error:
      raise UserError(
        f"{url}/{name} could not be copied to {target}: {_words(error)}"
      ) from error
  whole = [out / name for name in found]
  return str(whole[0] if files.isfile(root) else out)


def _listing(
  files: object, root: str, patterns: tuple[str, ...]
) -> dict[str, tuple[str, int]]:
  """name -> (its path there, bytes) of the files that match."""
  if files.isfile(root):
    return {os.path.basename(root): (root, files.size(root))}
  return {
    os.path.basename(entry["name"]): (entry["name"], entry["size"])
    for entry in files.ls(root, detail=True)
    if entry["type"] == "file"
    and any(fnmatch.fnmatch(entry["name"], p) for p in patterns)
  }


def _words(error: Exception) -> str:
  return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def snapshot(path: str, patterns: tuple[str, ...]) -> str:
  """A local copy of a hub model.

  Args:
    path: owner/name with an optional @revision.
    patterns: names of the files to fetch.

  Raises:
    UserError: there is no such model or revision, it is gated, or there is no
      network.
  """
  repo, _, revision = path.partition("@")
  try:
    import huggingface_hub
    from huggingface_hub import errors
  except ImportError as error:
    raise UserError(
      f"model {path!r} is no local path, and a hub id needs huggingface_hub:"
      " pip install -e '.[hf]'"
    ) from error
  try:
    return huggingface_hub.snapshot_download(
      repo, revision=revision or None, allow_patterns=list(patterns)
    )
  except errors.GatedRepoError as error:
    raise UserError(
      f"model {repo} is gated: accept its terms on the hub and log in with"
      " `hf auth login`"
    ) from error
  except errors.RevisionNotFoundError as error:
    raise UserError(f"model {repo} has no revision {revision!r}") from error
  except errors.RepositoryNotFoundError as error:
    raise UserError(
      f"model {repo} is not on the hub, or private without a token"
    ) from error
  except Exception as error:  # no network has many faces
    kind = type(error).__name__
    raise UserError(
      f"there is no run, model directory or file at {repo}, and as a hub id it"
      f" could not be fetched ({kind}); with no network, give a local path"
    ) from error

"""Counting the tokens of training data into vocabulary files: ``onmt_build_vocab``."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

from nmt.checkpoint.files import check_output
from nmt.options.paths import READ, check_files
from shared_embeddings.errors import UserError
from shared_embeddings.utils.files import staged
from shared_embeddings.utils.path_options import PathOption


def build_vocabularies(opt: Namespace, count: Callable[[Namespace], None], corpora: Iterable[str]) -> None:
    """Count the tokens of all corpora; the files appear together when they are complete.

    Args:
        opt: options of ``onmt_build_vocab``.
        count: writes the files that the options name.
        corpora: the names of the corpora.

    Raises:
        UserError: a file is not named, already exists, is an input or another output, cannot be written, or
            would be empty.
    """
    outputs = _outputs(opt)
    _check(opt, outputs, corpora)
    paths = [Path(path) for paths in outputs.values() for path in paths]
    with staged(paths) as places:
        place_of = dict(zip(map(str, paths), map(str, places)))
        for side, (path, *_) in outputs.items():
            setattr(opt, side, place_of[str(Path(path))])
        count(opt)
        for side in outputs:
            if not os.path.getsize(getattr(opt, side)):
                raise UserError(f"{side}: would be empty; data has no pair with text on both sides")


def _outputs(opt: Namespace) -> dict[str, list[str]]:
    """Return the files of each side, that of its words first; those of features follow.

    Raises:
        UserError: one is not named, or both sides have the same.
    """
    sides = ["src_vocab"] if opt.share_vocab else ["src_vocab", "tgt_vocab"]
    for side in sides:
        if not getattr(opt, side):
            raise UserError(f"{side}: is not set; name the file to write")
        check_output(side, getattr(opt, side))
    outputs = {side: [getattr(opt, side)] for side in sides}
    if len(sides) > 1 and os.path.realpath(opt.src_vocab) == os.path.realpath(opt.tgt_vocab):
        raise UserError(
            f"tgt_vocab: {opt.tgt_vocab} is the file of src_vocab, too; choose another one, or set "
            "share_vocab: true"
        )
    outputs["src_vocab"] += [f"{opt.src_vocab}_feat{number}" for number in range(opt.n_src_feats)]
    return outputs


def _check(opt: Namespace, outputs: dict[str, list[str]], corpora: Iterable[str]) -> None:
    """Check that no output is an input or there already.

    Raises:
        UserError: one is.
    """
    table = {**READ, **dict.fromkeys(outputs, PathOption.OUTPUT)}
    if opt.learn_subwords:
        table["src_subword_model"] = PathOption.OUTPUT
    changed = {**vars(opt), **outputs}
    if opt.dump_samples:
        folder = os.path.join(os.path.dirname(opt.save_data or ""), "sample")
        changed["samples"] = [
            os.path.join(folder, f"{name}.sample.{side}") for name in corpora for side in ("src", "tgt")
        ]
        table["samples"] = PathOption.OUTPUT
    check_files(Namespace(**changed), table)
    for side, paths in outputs.items():
        taken = next(filter(os.path.isfile, paths), None)
        if taken is not None and not opt.overwrite:
            raise UserError(f"{side}: {taken} already exists; add -overwrite, or name another file")

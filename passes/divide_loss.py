"""divide_loss: write the loss of a batch as the sum of what its parts give, with the batch's own counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tpcompile.errors import InputError
from tpcompile.factors import LayoutError
from tpcompile.ir import Draft, Program
from tpcompile.passes._pairs import Study, paired, studied
from tpcompile.passes._reasons import user_line
from tpcompile.passes._renewed import update_reason
from tpcompile.passes._rows import Rows
from tpcompile.passes._shares import Shares


def divide_loss(program: Program, witness: Program | None = None, accepted: Iterable[str] = ()) -> Program:
    """Make the loss of a batch the sum of its parts' losses, given the batch's counts; or say why it is not.

    Any value is divided so that is linear in sums over rows: sums and means of rows, losses with a mean inside, their quotients by what
    the inputs alone decide, weighted sums of all these, and what is the same in every part, of which each part adds its share. `accepted`
    are patterns of modules' paths, lines, or their text: what mixes a micro-batch's rows there is taken as it is, and its mean over the
    parts is the batch's.

    In a program captured for a fixed number of rows, they cannot be told from other sizes: there a `witness` of the same model with more
    rows has to show what they do. What forward does to buffers is judged likewise.

    before  %loss = cross_entropy_loss(%logits, %labels, mean)
    after   %sum = cross_entropy_loss(%logits, %labels, sum)
            %mean = div(%sum, %loss_count_0)                  count: the labels that are not ignored
            %loss = mul(%mean, %replicas)                     the engine averages over replicas

    Raises InputError for a pattern that names nothing.
    """
    program = replace(program, update_reason=update_reason(witness or program))
    if program.loss is None:
        return program
    rows = Rows.of(witness or program, accepted)
    reason = _objection(rows)
    if unmatched := [pattern for pattern in rows.sums.accepted if pattern not in rows.sums.matched]:
        what = f"overrides name nothing that mixes the rows of a micro-batch: {unmatched[0]!r}"
        fix = f"leave it out, or name the line of what is refused: {reason}" if reason else "leave it out"
        raise InputError(what, at="compile(overrides=…)", source=user_line(), fix=fix)
    try:
        study: Study | None = None if reason else studied(rows) if witness is None else paired(program, rows)
    except LayoutError as error:
        reason = str(error)
    if reason or study is None:
        return Draft(program).freeze(loss_reason=reason)
    return Shares(program, study).program()


def _objection(rows: Rows) -> str:
    """Why the loss is no sum of what parts give; "" when it is."""
    assert rows.program.loss is not None
    loss = rows.program.nodes()[rows.program.loss]
    if not (reason := rows.reason(loss)) and rows.depends(loss):
        reason = f"{rows.at(loss)} is no sum or mean over the batch's rows"
    return reason

"""What is known of an optimizer stands in its row: no code outside asks for one by its name."""

import ast
from pathlib import Path
from typing import get_args

from flatout.config.optimizers import OPTIMIZERS, OptimizerName
from flatout.config.schema import OptimConfig

SOURCE = Path(__file__).parents[2] / "src" / "flatout"
# The table, and settings of earlier versions, which went by names.
MAY_COMPARE = (SOURCE / "config" / "optimizers.py", SOURCE / "config" / "former.py")


def test_a_row_for_every_value_with_fields_that_there_are():
    assert tuple(OPTIMIZERS) == get_args(OptimizerName)
    for kind in OPTIMIZERS.values():
        assert {*kind.reads, kind.rate} <= OptimConfig.model_fields.keys()
        assert kind.rate == "learning_rate" or kind.rate in kind.reads


def test_no_comparison_with_a_name_outside_the_table_and_optim():
    asked = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent != SOURCE / "optim" and path not in MAY_COMPARE
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare | ast.MatchValue)
        if any(isinstance(one, ast.Constant) and one.value in OPTIMIZERS for one in ast.walk(node))
    ]
    assert not asked, "give OptimizerKind a field for what it asks"

"""The paper's tables: what they print, which of our runs answer each row, and the two side by side."""

from ella_cuda.papers.equivariances.comparison import comparison_csv, comparison_table, read_comparison, save_comparison
from ella_cuda.papers.equivariances.entry import Entry, entries
from ella_cuda.papers.equivariances.pictures import draw_comparison
from ella_cuda.papers.equivariances.plan import Cell, Plan, plan_table, scaled
from ella_cuda.papers.equivariances.tables import TABLES, Printed, Row, Table

__all__ = [
    "TABLES",
    "Cell",
    "Entry",
    "Plan",
    "Printed",
    "Row",
    "Table",
    "comparison_csv",
    "comparison_table",
    "draw_comparison",
    "entries",
    "plan_table",
    "read_comparison",
    "save_comparison",
    "scaled",
]

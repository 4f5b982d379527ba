"""One self-contained HTML page about a plan, or about the steps of a training log."""

from megatron_nsp.report.log_page import log_page
from megatron_nsp.report.plan_page import plan_page

__all__ = ["log_page", "plan_page"]

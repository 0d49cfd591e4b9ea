"""Write a verdict or a plan as one HTML page without external files, scripts or network."""

from emulate.report.html.write import check_libraries, write_html, write_plan_html

__all__ = ["check_libraries", "write_html", "write_plan_html"]

"""Write the verdict as one HTML page without external files, scripts or network."""

from emulate.report.html.write import check_libraries, write_html

__all__ = ["check_libraries", "write_html"]

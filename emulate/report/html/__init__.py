"""The verdict as one HTML page that needs nothing beside itself: no script, no network."""

from emulate.report.html.write import check_libraries, write_html

__all__ = ["check_libraries", "write_html"]

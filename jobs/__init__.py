"""Ray jobs: what runs beside the serving, on a schedule or by hand."""

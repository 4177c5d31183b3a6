"""The morning report and the history of refreshes that it reads."""

-- What invoices and budgets are made of is only changed by functions. The version before this one loads usage with
-- statements of its own.
REVOKE INSERT ON usage FROM loraplex_app;
REVOKE INSERT, UPDATE ON usage_hourly FROM loraplex_app;
REVOKE INSERT, UPDATE, DELETE ON usage_totals FROM loraplex_app;

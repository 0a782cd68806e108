-- What each gateway served in its last minute, as `loraplex top` and `loraplex status` show it.

CREATE TABLE gateway_load (
    gateway_id  text PRIMARY KEY REFERENCES gateways ON DELETE CASCADE,
    reported_at timestamptz NOT NULL DEFAULT now(),
    load        jsonb NOT NULL -- admin/gateway_load.py
);

-- The operators': it is about all tenants at once.
ALTER TABLE gateway_load ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON gateway_load TO loraplex_app
    USING ((SELECT current_setting('loraplex.tenant', true)) = '*');
GRANT SELECT, INSERT, UPDATE, DELETE ON gateway_load TO loraplex_app;

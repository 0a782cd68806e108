-- Creates that clients may repeat: what the first answered, by the header Idempotency-Key.

-- No secret is in it: the text of an API key that was made follows from `nonce`, the pepper, and the header, of which
-- only a keyed hash is here. When the row goes, nobody can make that text again.
CREATE TABLE idempotent_requests (
    id         bytea PRIMARY KEY CHECK (length(id) = 32),   -- keyed hash of the caller's key id and the header
    request    bytea NOT NULL CHECK (length(request) = 32), -- hash of method, path, query and body
    nonce      bytea NOT NULL CHECK (length(nonce) = 32),
    answer     text,                                        -- null only inside the transaction that makes it
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX idempotent_requests_age ON idempotent_requests (created_at);

-- Only the operators' keys create things this way: tenants see none of it.
ALTER TABLE idempotent_requests ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON idempotent_requests TO loraplex_app
    USING ((SELECT current_setting('loraplex.tenant', true)) = '*');
GRANT SELECT, INSERT, UPDATE, DELETE ON idempotent_requests TO loraplex_app;

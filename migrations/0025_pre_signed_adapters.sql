-- Public keys with which tenants sign their adapters, and the signatures of versions.

CREATE TABLE signing_keys (
    id         text PRIMARY KEY CHECK (id ~ '^sig_[0-9A-Za-z]{12}$'),
    tenant_id  text NOT NULL REFERENCES tenants ON DELETE CASCADE,
    name       entity_name NOT NULL,
    public_key bytea NOT NULL CHECK (length(public_key) = 32), -- ed25519
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz,
    UNIQUE (tenant_id, public_key),
    UNIQUE (tenant_id, id)
);
GRANT SELECT, INSERT, UPDATE ON signing_keys TO loraplex_app;
ALTER TABLE signing_keys ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON signing_keys TO loraplex_app USING (
    (SELECT current_setting('loraplex.tenant', true)) = '*'
    OR tenant_id = (SELECT current_setting('loraplex.tenant', true)));
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON signing_keys
    FOR EACH ROW EXECUTE FUNCTION audit_change('signing_key', 'id', '');

-- Of a version's content. A later upload of the same content may bring another signature.
ALTER TABLE adapter_versions
    ADD COLUMN signed_by text,
    ADD COLUMN signature bytea CHECK (length(signature) = 64),
    ADD CONSTRAINT adapter_versions_signed CHECK (num_nulls(signed_by, signature) IN (0, 2)),
    ADD CONSTRAINT adapter_versions_signed_by_fkey
        FOREIGN KEY (tenant_id, signed_by) REFERENCES signing_keys (tenant_id, id);
CREATE INDEX adapter_versions_signed ON adapter_versions (tenant_id, signed_by) WHERE signed_by IS NOT NULL;

ALTER TABLE tenants ADD COLUMN require_signature boolean NOT NULL DEFAULT false;

-- As before, and a signing key is revoked, too.
CREATE OR REPLACE FUNCTION audit_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
DECLARE
    kind    text := TG_ARGV[0];
    hidden  text[] := string_to_array(TG_ARGV[2], ',');
    was     jsonb := CASE WHEN TG_OP <> 'INSERT' THEN to_jsonb(OLD) - hidden END;
    becomes jsonb := CASE WHEN TG_OP <> 'DELETE' THEN to_jsonb(NEW) - hidden END;
    logged  jsonb := coalesce(becomes, was);
    verb    text;
BEGIN
    IF TG_OP = 'DELETE' AND was ->> 'tenant_id' IS NOT NULL
        AND NOT EXISTS (SELECT FROM tenants WHERE id = was ->> 'tenant_id') THEN
        RETURN NULL;
    END IF;
    IF TG_OP = 'UPDATE' THEN
        SELECT jsonb_object_agg(key, jsonb_build_array(was -> key, value)) INTO logged
            FROM jsonb_each(becomes) WHERE value IS DISTINCT FROM was -> key;
        IF logged IS NULL THEN
            RETURN NULL;
        END IF;
    END IF;
    verb := CASE
        WHEN kind = 'alias' AND TG_OP = 'INSERT' THEN becomes ->> 'reason'
        WHEN kind = 'key' AND TG_OP = 'INSERT' AND becomes ->> 'replaces' IS NOT NULL THEN 'rotate'
        WHEN kind IN ('key', 'signing_key') AND TG_OP = 'UPDATE' AND logged ? 'revoked_at' THEN 'revoke'
        WHEN kind = 'version' AND TG_OP = 'UPDATE' AND logged ? 'state' THEN becomes ->> 'state'
        ELSE (ARRAY['create', 'update', 'delete'])[array_position(ARRAY['INSERT', 'UPDATE', 'DELETE'], TG_OP)] END;
    INSERT INTO audit_log (tenant_id, action, object, details)
    SELECT CASE kind WHEN 'tenant' THEN whole ->> 'id' ELSE whole ->> 'tenant_id' END,
           kind || '.' || verb,
           (SELECT string_agg(whole ->> part, '@' ORDER BY place)
            FROM unnest(string_to_array(TG_ARGV[1], ',')) WITH ORDINALITY AS p (part, place)),
           logged
    FROM coalesce(becomes, was) AS whole;
    RETURN NULL;
END $$;

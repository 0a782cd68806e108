-- Keys that are narrower than their tenant, and a log of every change that nobody can rewrite unseen.

ALTER TABLE api_keys
    ADD COLUMN not_before timestamptz,
    ADD COLUMN models     text[] CHECK (cardinality(models) > 0), -- as the tenant calls them; null: all
    ADD COLUMN cidrs      cidr[] CHECK (cardinality(cidrs) > 0),  -- networks of its users; null: any
    ADD COLUMN replaces   text,                                   -- id of the key it was rotated from
    ADD CONSTRAINT api_keys_lifetime CHECK (not_before < expires_at);

-- Apart from the keys: a use is no change of the catalog.
CREATE TABLE key_uses (
    key_id       text PRIMARY KEY REFERENCES api_keys ON DELETE CASCADE,
    last_used_at timestamptz NOT NULL
);

-- One chain: each row's hash covers the hash of the row before it. Who changes a row, or takes one out, must rewrite
-- all that follow; who keeps the newest hash elsewhere sees even that.
CREATE TABLE audit_log (
    seq        bigint PRIMARY KEY,
    at         timestamptz NOT NULL,
    key_id     text NOT NULL, -- who did it; 'system': nobody's request
    tenant_id  text,          -- whose things; null: the operator's
    action     text NOT NULL,
    object     text NOT NULL,
    details    jsonb NOT NULL,
    request_id text,
    prev       bytea NOT NULL CHECK (length(prev) = 32),
    hash       bytea NOT NULL CHECK (length(hash) = 32)
);
CREATE INDEX audit_log_tenant ON audit_log (tenant_id, seq);
CREATE INDEX audit_log_object ON audit_log (object, seq);

-- Length first, so that no two lists of fields read the same; null is not the empty text.
CREATE FUNCTION audit_field(value text) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN value IS NULL THEN '\x00'::bytea
                ELSE '\x01'::bytea || int4send(octet_length(convert_to(value, 'UTF8'))) || convert_to(value, 'UTF8') END
$$;

-- Who and for which request is told by the transaction: loraplex.key_id, loraplex.request_id.
-- The catalog's lock, which most changes hold already, makes it one chain.
CREATE FUNCTION audit_chain() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    SELECT seq, hash INTO NEW.seq, NEW.prev FROM audit_log ORDER BY seq DESC LIMIT 1;
    NEW.seq := coalesce(NEW.seq, 0) + 1;
    NEW.prev := coalesce(NEW.prev, decode(repeat('00', 32), 'hex'));
    NEW.at := clock_timestamp();
    NEW.key_id := coalesce(nullif(current_setting('loraplex.key_id', true), ''), 'system');
    NEW.request_id := nullif(current_setting('loraplex.request_id', true), '');
    NEW.hash := sha256(
        NEW.prev || audit_field(NEW.seq::text)
        || audit_field((extract(epoch FROM NEW.at) * 1000000)::bigint::text)
        || audit_field(NEW.key_id) || audit_field(NEW.tenant_id) || audit_field(NEW.action) || audit_field(NEW.object)
        || audit_field(NEW.details::text) || audit_field(NEW.request_id));
    RETURN NEW;
END $$;

CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit log only grows' USING ERRCODE = 'integrity_constraint_violation';
END $$;

CREATE TRIGGER chain BEFORE INSERT ON audit_log FOR EACH ROW EXECUTE FUNCTION audit_chain();
CREATE TRIGGER only_grows BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change();

-- A row of the log for each row that a statement changed, in its transaction.
-- Arguments: what the row is; the columns that name it, joined by '@'; the columns that are not logged: secrets, what is
-- large, and what only mirrors something else. What goes with its tenant is told by the tenant's row.
CREATE FUNCTION audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
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
        WHEN kind = 'key' AND TG_OP = 'UPDATE' AND logged ? 'revoked_at' THEN 'revoke'
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

CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON tenants
    FOR EACH ROW EXECUTE FUNCTION audit_change('tenant', 'id', '');
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON api_keys
    FOR EACH ROW EXECUTE FUNCTION audit_change('key', 'id', 'hash');
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON base_models
    FOR EACH ROW EXECUTE FUNCTION audit_change('model', 'name', 'shape');
CREATE TRIGGER audit AFTER INSERT OR DELETE ON adapters
    FOR EACH ROW EXECUTE FUNCTION audit_change('adapter', 'name', 'last_version');
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON adapter_versions
    FOR EACH ROW EXECUTE FUNCTION audit_change(
        'version', 'name,version', 'manifest,serving,ready_generation,retired_generation');
CREATE TRIGGER audit AFTER INSERT ON alias_history
    FOR EACH ROW EXECUTE FUNCTION audit_change('alias', 'name,alias', 'id,changed_at');
CREATE TRIGGER audit_pin AFTER UPDATE OF pinned ON aliases
    FOR EACH ROW EXECUTE FUNCTION audit_change('alias', 'name,alias', '');
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON approved_templates
    FOR EACH ROW EXECUTE FUNCTION audit_change('template', 'digest', '');

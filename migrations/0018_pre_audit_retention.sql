-- The client's address in each audit row, and an end to how long rows are kept.

-- Null: no request's change, one over a Unix socket, or one from before there was this column.
ALTER TABLE audit_log ADD COLUMN address text;
CREATE INDEX audit_log_prunes ON audit_log (seq) WHERE action = 'audit.prune';

-- As before, and of a row with an address the hash covers it too: the rows that are there stay as they were written. Fields
-- say their length, so no row without an address reads like one that has one.
CREATE OR REPLACE FUNCTION audit_chain() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    SELECT seq, hash INTO NEW.seq, NEW.prev FROM audit_log ORDER BY seq DESC LIMIT 1;
    NEW.seq := coalesce(NEW.seq, 0) + 1;
    NEW.prev := coalesce(NEW.prev, decode(repeat('00', 32), 'hex'));
    NEW.at := clock_timestamp();
    NEW.key_id := coalesce(nullif(current_setting('loraplex.key_id', true), ''), 'system');
    NEW.request_id := nullif(current_setting('loraplex.request_id', true), '');
    NEW.address := nullif(current_setting('loraplex.address', true), '');
    NEW.hash := sha256(
        NEW.prev || audit_field(NEW.seq::text)
        || audit_field((extract(epoch FROM NEW.at) * 1000000)::bigint::text)
        || audit_field(NEW.key_id) || audit_field(NEW.tenant_id) || audit_field(NEW.action) || audit_field(NEW.object)
        || audit_field(NEW.details::text) || audit_field(NEW.request_id)
        || CASE WHEN NEW.address IS NULL THEN ''::bytea ELSE audit_field(NEW.address) END);
    RETURN NEW;
END $$;

-- Only audit_prune says so, and only the owner's rights let a row go.
CREATE OR REPLACE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('loraplex.prunes_audit', true) = 'yes' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'the audit log only grows' USING ERRCODE = 'integrity_constraint_violation';
END $$;

-- Deletes the rows up to `through`, whose hash is `last_hash`, and leaves a row of the chain that says so: the checkpoint
-- from which the chain is verified since. `seal` is a keyed hash of it, with a key that is not in the database. Nothing goes
-- that is younger than 30 days, whatever is asked.
CREATE FUNCTION audit_prune(through bigint, last_hash text, seal text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    IF NOT EXISTS (
        SELECT FROM audit_log
        WHERE seq = through AND hash = decode(last_hash, 'hex') AND at < now() - interval '30 days') THEN
        RAISE EXCEPTION 'audit row % is not there or too young to go', through USING ERRCODE = 'check_violation';
    END IF;
    -- First, for it follows the newest row there is, which may go.
    INSERT INTO audit_log (action, object, details)
        SELECT 'audit.prune', through::text, jsonb_build_object('rows', count(*), 'hash', last_hash, 'seal', seal)
        FROM audit_log WHERE seq <= through;
    PERFORM set_config('loraplex.prunes_audit', 'yes', true);
    DELETE FROM audit_log WHERE seq <= through;
    PERFORM set_config('loraplex.prunes_audit', '', true);
END $$;

DO $$
DECLARE
    prune regprocedure := 'audit_prune(bigint,text,text)';
BEGIN
    EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', prune, current_schema());
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', prune);
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO loraplex_app', prune);
END $$;

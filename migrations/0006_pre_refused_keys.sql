-- Refused API keys are in the audit log. Gateways and admin planes count them and call this function once a minute.

-- Adds entries to the audit log, [{key_id, tenant_id, address, request_id, details}], one for each group of requests
-- that were refused for their key. `key_id` is null if no such key exists.
CREATE FUNCTION audit_refused_keys(rows jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    refused record;
BEGIN
    IF jsonb_array_length(rows) > 100 THEN
        RAISE EXCEPTION 'more than 100 entries for refused keys' USING ERRCODE = 'check_violation';
    END IF;
    FOR refused IN
        SELECT * FROM jsonb_to_recordset(rows) AS r (
            key_id text, tenant_id text, address text, request_id text, details jsonb)
    LOOP
        PERFORM set_config('loraplex.key_id', coalesce(refused.key_id, 'unknown'), true),
                set_config('loraplex.request_id', coalesce(refused.request_id, ''), true),
                set_config('loraplex.address', coalesce(refused.address, ''), true);
        INSERT INTO audit_log (tenant_id, action, object, details)
        VALUES (refused.tenant_id, 'key.refuse', coalesce(refused.key_id, 'unknown'), refused.details);
    END LOOP;
END $$;

DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION audit_refused_keys(jsonb) SECURITY DEFINER SET search_path = %I, pg_temp',
                   current_schema());
END $$;
REVOKE EXECUTE ON FUNCTION audit_refused_keys(jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION audit_refused_keys(jsonb) TO loraplex_app;

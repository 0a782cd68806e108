-- Who may do and see what. The owner of the schema migrates; gateways and the admin plane work as loraplex_app.

-- Each of their connections or transactions says in `loraplex.tenant` whose rows it means: the id of a tenant, '*' for
-- all of them, or nothing, and then there are none. That holds for a query that forgets to ask for a tenant too.

-- A later migration that makes a table grants what the planes need of it, and gives it a policy or a reason to have none:
-- tests/admin/test_isolation.py asks for one of the two.

-- Roles belong to the cluster: another database may have made it, or be making it now.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'loraplex_app') THEN
        CREATE ROLE loraplex_app NOLOGIN;
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN
        NULL;
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'there is no role loraplex_app and % may not create it', CURRENT_USER
            USING ERRCODE = 'insufficient_privilege', HINT = 'See docs/postgres.md.';
END $$;

-- One URL is enough: the owner's connections can become loraplex_app. Who may grant a role is not always one who may
-- become it, hence the attempt.
DO $$
BEGIN
    SET LOCAL ROLE loraplex_app;
    RESET ROLE;
EXCEPTION WHEN insufficient_privilege THEN
    GRANT loraplex_app TO CURRENT_USER;
END $$;

DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'loraplex_app' AND (rolsuper OR rolbypassrls)) THEN
        RAISE EXCEPTION 'the role loraplex_app must not be a superuser nor bypass row-level security';
    END IF;
    EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC', current_schema());
    IF NOT has_schema_privilege('loraplex_app', current_schema(), 'USAGE') THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO loraplex_app', current_schema());
    END IF;
END $$;

-- What changes and goes.
GRANT SELECT, INSERT, UPDATE, DELETE ON
    tenants, api_keys, adapters, adapter_versions, version_proving, aliases, canary_targets, version_outcomes,
    adapter_faults, gateways, loose_contents, base_models, prices, quotas, quota_holders, quota_leases, usage_totals
    TO loraplex_app;
-- What changes.
GRANT SELECT, INSERT, UPDATE ON key_uses, usage_hourly TO loraplex_app;
GRANT SELECT, UPDATE ON catalog_generation TO loraplex_app;
-- What goes with the thing it is about, and is never changed.
GRANT SELECT, INSERT, DELETE ON alias_history, adapter_proofs, approved_templates TO loraplex_app;
-- What stays as it was written.
GRANT SELECT, INSERT ON usage TO loraplex_app; -- on its days none: they are reached through it
-- What only functions below write.
GRANT SELECT ON audit_log, usage_kept, schema_migrations TO loraplex_app;
GRANT USAGE ON SEQUENCE quota_calls TO loraplex_app;

-- Of an API key that was shown all there is to know: whose it is, is not known before.
CREATE FUNCTION key_by_id(of_id text) RETURNS SETOF api_keys LANGUAGE sql STABLE SECURITY DEFINER AS $$
    SELECT * FROM api_keys WHERE id = of_id
$$;

-- Asked about every tenant's versions, whoever asks: what one does not see must not go.
CREATE FUNCTION content_is_free(of_digest text) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER AS $$
    SELECT NOT EXISTS (SELECT FROM loose_contents WHERE digest = of_digest AND due > now())
        AND NOT EXISTS (SELECT FROM adapter_versions WHERE digest = of_digest AND state <> 'rejected')
$$;

-- These do more than their caller may. Each finds its tables in this schema, whatever the caller's search path.
DO $$
DECLARE
    privileged regprocedure;
BEGIN
    FOREACH privileged IN ARRAY ARRAY[
        'key_by_id(text)', 'content_is_free(text)',
        'audit_change()', -- alone writes the log, and follows the whole chain whosever the change is
        'usage_make_partition(date)', 'usage_drop_before(date)' -- make and drop tables
    ]::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', privileged, current_schema());
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', privileged);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO loraplex_app', privileged);
    END LOOP;
END $$;

-- The owner sees everything: foreign keys are checked, and the functions above run, as the owner.
DO $$
DECLARE
    -- In a subquery it is read once a statement, not once a row.
    scope   text := '(SELECT current_setting(''loraplex.tenant'', true))';
    guarded record;
BEGIN
    FOR guarded IN
        SELECT * FROM (VALUES
            ('tenants', 'id = %1$s'),
            ('api_keys', 'tenant_id = %1$s'), -- an admin key is nobody's: seen with '*' alone
            ('adapters', 'tenant_id = %1$s'),
            ('adapter_versions', 'tenant_id = %1$s'),
            ('version_proving', 'tenant_id = %1$s'),
            ('aliases', 'tenant_id = %1$s'),
            ('alias_history', 'tenant_id = %1$s'),
            ('canary_targets', 'tenant_id = %1$s'),
            ('audit_log', 'tenant_id = %1$s'),
            ('quotas', 'tenant_id = %1$s'),
            ('usage', 'tenant_id = %1$s'), -- its days have none of their own: nobody reaches them directly
            ('usage_hourly', 'tenant_id = %1$s'),
            -- As what they belong to, whose own policy decides.
            ('key_uses', 'EXISTS (SELECT FROM api_keys k WHERE k.id = key_uses.key_id)'),
            ('version_outcomes', 'EXISTS (SELECT FROM alias_history h WHERE h.id = version_outcomes.change)'),
            ('usage_totals', 'subject = %1$s OR EXISTS (SELECT FROM api_keys k WHERE k.id = usage_totals.subject)'),
            ('quota_leases', 'subject = %1$s OR EXISTS (SELECT FROM api_keys k WHERE k.id = quota_leases.subject)'),
            -- A gateway's row is about all tenants at once.
            ('quota_holders', 'false')
        ) AS t (name, own)
    LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', guarded.name);
        EXECUTE format(
            'CREATE POLICY tenant ON %I TO loraplex_app USING (%s = ''*'' OR %s)',
            guarded.name, scope, format(guarded.own, scope));
    END LOOP;
END $$;
-- Nobody's in particular: catalog_generation, base_models, prices, usage_kept, schema_migrations and what is known of a
-- content by its digest (adapter_proofs, adapter_faults, approved_templates, loose_contents). Of `gateways` a tenant's
-- request needs the generations; what is in flight names other tenants' adapters and is not shown to any.

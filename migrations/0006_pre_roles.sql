-- The role that gateways and the admin plane work as, and what it may do and see.

DO $$
BEGIN
    -- Roles belong to the cluster: another database may have made it, or be making it now.
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'loraplex_app') THEN
        CREATE ROLE loraplex_app NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL;
END $$;

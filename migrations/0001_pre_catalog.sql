-- Tenants, keys, base models and adapters, and the generation that tells gateways when any of it changed.

-- One row. Every statement that changes the catalog bumps it first, which also puts catalog writers in a queue:
-- what a trigger reads after the bump is what all earlier writers committed.
CREATE TABLE catalog_generation (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    generation bigint NOT NULL
);
INSERT INTO catalog_generation (generation) VALUES (1);

CREATE FUNCTION bump_catalog() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    now_at bigint;
BEGIN
    UPDATE catalog_generation SET generation = generation + 1 RETURNING generation INTO now_at;
    PERFORM pg_notify('loraplex_catalog', now_at::text);
    RETURN NULL;
END $$;

-- No '/' (it parts tenant from adapter) and no '@' (it parts adapter from version or alias).
CREATE DOMAIN entity_name AS text
    CONSTRAINT entity_name_form CHECK (VALUE ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$');
-- Not a number either: name@7 is version 7.
CREATE DOMAIN alias_name AS text
    CONSTRAINT alias_name_form CHECK (VALUE ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$' AND VALUE !~ '^[0-9]+$');
CREATE DOMAIN content_digest AS text
    CONSTRAINT content_digest_form CHECK (VALUE ~ '^[0-9a-f]{64}$');

CREATE TABLE tenants (
    id            text PRIMARY KEY CHECK (id ~ '^ten_[0-9A-Za-z]{12}$'),
    name          entity_name NOT NULL UNIQUE CHECK (name !~ '^ten_'),
    sharing_group entity_name,
    created_at    timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE api_keys (
    id         text PRIMARY KEY CHECK (id ~ '^[0-9A-Za-z]{12}$'),
    tenant_id  text REFERENCES tenants ON DELETE CASCADE,
    name       text NOT NULL DEFAULT '' CHECK (length(name) <= 128),
    hash       bytea NOT NULL CHECK (length(hash) = 32),
    scopes     text[] NOT NULL CHECK (cardinality(scopes) > 0),
    expires_at timestamptz,
    revoked_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT api_keys_scopes CHECK (
        CASE WHEN tenant_id IS NULL THEN scopes = '{admin}'
             ELSE scopes <@ '{inference,adapters:write,usage:read}' END)
);
CREATE INDEX api_keys_tenant ON api_keys (tenant_id);

CREATE TABLE base_models (
    name          entity_name PRIMARY KEY,
    digest        content_digest NOT NULL,
    shape         jsonb NOT NULL,
    max_model_len integer NOT NULL CHECK (max_model_len > 0),
    created_at    timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE adapters (
    tenant_id    text NOT NULL REFERENCES tenants ON DELETE CASCADE,
    name         entity_name NOT NULL,
    last_version integer NOT NULL DEFAULT 0, -- of any version ever made: numbers are not used twice
    created_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, name)
);
CREATE INDEX adapters_name ON adapters (name);

CREATE TABLE adapter_versions (
    tenant_id  text NOT NULL,
    name       text NOT NULL,
    version    integer NOT NULL CHECK (version > 0),
    state      text NOT NULL CHECK (state IN ('uploading', 'validating', 'proving', 'ready', 'rejected')),
    digest     content_digest,
    base_name  text REFERENCES base_models (name),
    manifest   jsonb,
    error      jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, name, version),
    FOREIGN KEY (tenant_id, name) REFERENCES adapters ON DELETE CASCADE,
    CONSTRAINT adapter_versions_complete CHECK (
        CASE state WHEN 'ready' THEN num_nonnulls(digest, base_name, manifest) = 3 AND error IS NULL
                   WHEN 'rejected' THEN error IS NOT NULL
                   ELSE true END)
);
CREATE UNIQUE INDEX adapter_versions_content ON adapter_versions (tenant_id, name, base_name, digest)
    WHERE state = 'ready';
CREATE INDEX adapter_versions_base ON adapter_versions (base_name);
CREATE INDEX adapter_versions_digest ON adapter_versions (digest);

CREATE TABLE aliases (
    tenant_id text NOT NULL,
    name      text NOT NULL,
    alias     alias_name NOT NULL,
    version   integer NOT NULL,
    PRIMARY KEY (tenant_id, name, alias),
    FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions ON DELETE NO ACTION
        DEFERRABLE INITIALLY DEFERRED,
    FOREIGN KEY (tenant_id, name) REFERENCES adapters ON DELETE CASCADE
);
CREATE INDEX aliases_version ON aliases (tenant_id, name, version);

CREATE TABLE alias_history (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id  text NOT NULL,
    name       text NOT NULL,
    alias      text NOT NULL,
    version    integer NOT NULL,
    previous   integer,
    changed_by text, -- key id
    changed_at timestamptz NOT NULL DEFAULT now(),
    FOREIGN KEY (tenant_id, name) REFERENCES adapters ON DELETE CASCADE
);
CREATE INDEX alias_history_alias ON alias_history (tenant_id, name, alias, id);

CREATE FUNCTION keep_version_immutable() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state IN ('ready', 'rejected')
        OR (OLD.tenant_id, OLD.name, OLD.version) IS DISTINCT FROM (NEW.tenant_id, NEW.name, NEW.version)
    THEN
        RAISE EXCEPTION 'version % of % is immutable', OLD.version, OLD.name
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION keep_names_apart() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_TABLE_NAME = 'adapters' AND EXISTS (SELECT FROM base_models WHERE name = NEW.name) THEN
        RAISE EXCEPTION 'a base model is named %', NEW.name USING ERRCODE = 'unique_violation';
    END IF;
    IF TG_TABLE_NAME = 'base_models' AND EXISTS (SELECT FROM adapters WHERE name = NEW.name) THEN
        RAISE EXCEPTION 'an adapter is named %', NEW.name USING ERRCODE = 'unique_violation';
    END IF;
    RETURN NEW;
END $$;

DO $$
DECLARE
    changed text;
BEGIN
    FOREACH changed IN ARRAY ARRAY['tenants', 'api_keys', 'base_models', 'adapters', 'adapter_versions', 'aliases']
    LOOP
        EXECUTE format('CREATE TRIGGER a_bump BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %I
                        FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog()', changed);
    END LOOP;
END $$;

CREATE TRIGGER immutable BEFORE UPDATE ON adapter_versions
    FOR EACH ROW EXECUTE FUNCTION keep_version_immutable();
CREATE TRIGGER names_apart BEFORE INSERT OR UPDATE OF name ON adapters
    FOR EACH ROW EXECUTE FUNCTION keep_names_apart();
CREATE TRIGGER names_apart BEFORE INSERT OR UPDATE OF name ON base_models
    FOR EACH ROW EXECUTE FUNCTION keep_names_apart();

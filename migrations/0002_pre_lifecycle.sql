-- Adapters that live: proofs of what packed images hold, serving data of a version, canaries, pins, retirement, and
-- what gateways and workers report. Tables that change with traffic do not bump the catalog.

-- A version is its weights and its serving data; either makes it a new one. A retired version serves the requests
-- that have it and no others; its row goes when no gateway that has seen the retirement has one in flight.
ALTER TABLE adapter_versions
    DROP CONSTRAINT adapter_versions_state_check,
    ADD CONSTRAINT adapter_versions_state_check
        CHECK (state IN ('uploading', 'validating', 'proving', 'ready', 'rejected', 'retired')),
    DROP CONSTRAINT adapter_versions_complete,
    ADD CONSTRAINT adapter_versions_complete CHECK (
        CASE WHEN state IN ('proving', 'ready') THEN num_nonnulls(digest, base_name, manifest) = 3 AND error IS NULL
             WHEN state = 'rejected' THEN error IS NOT NULL
             WHEN state = 'retired' THEN retired_at IS NOT NULL AND retired_generation IS NOT NULL
             ELSE true END),
    ADD COLUMN serving            jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN wanted_alias       alias_name, -- pointed to the version when it is ready, then null
    ADD COLUMN uploaded_by        text,       -- key id
    ADD COLUMN ready_generation   bigint,     -- a gateway at this generation serves it
    ADD COLUMN retired_at         timestamptz,
    ADD COLUMN retired_generation bigint;     -- a gateway at this generation starts nothing new with it

DROP INDEX adapter_versions_content;
CREATE UNIQUE INDEX adapter_versions_content
    ON adapter_versions (tenant_id, name, base_name, digest, md5(serving::text))
    WHERE state IN ('proving', 'ready');
CREATE INDEX adapter_versions_unsettled ON adapter_versions (state) WHERE state IN ('proving', 'retired');

CREATE OR REPLACE FUNCTION keep_version_immutable() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.tenant_id, OLD.name, OLD.version) IS DISTINCT FROM (NEW.tenant_id, NEW.name, NEW.version)
        OR OLD.state IN ('rejected', 'retired')
        OR (OLD.state IN ('proving', 'ready')
            AND (OLD.digest, OLD.base_name, OLD.manifest, OLD.serving)
                IS DISTINCT FROM (NEW.digest, NEW.base_name, NEW.manifest, NEW.serving)
            AND NEW.state <> 'rejected')
        OR (OLD.state = 'ready' AND NEW.state NOT IN ('ready', 'retired'))
    THEN
        RAISE EXCEPTION 'version % of % is immutable', OLD.version, OLD.name
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;

-- One row for each version in state proving: who proves it now, and why nobody could so far.
CREATE TABLE version_proving (
    tenant_id     text NOT NULL,
    name          text NOT NULL,
    version       integer NOT NULL,
    claimed_by    text,
    claimed_until timestamptz,
    attempts      integer NOT NULL DEFAULT 0,
    detail        text,
    PRIMARY KEY (tenant_id, name, version),
    FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions ON DELETE CASCADE
);

-- What the image of a content is in a worker's layout, and what the model answers with it.
CREATE TABLE adapter_proofs (
    digest      content_digest NOT NULL,
    base_digest content_digest NOT NULL,
    layout      text NOT NULL,
    checksum    content_digest NOT NULL,
    fingerprint jsonb NOT NULL,
    worker      text NOT NULL,
    proved_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (digest, base_digest, layout)
);

-- Chat templates that an admin let run, by the SHA-256 of their text.
CREATE TABLE approved_templates (
    digest      content_digest PRIMARY KEY,
    approved_by text,
    approved_at timestamptz NOT NULL DEFAULT now()
);

-- While an alias has targets it is a canary set: requests are split over them by weight. `aliases.version` is the
-- stable one among them, to which a rollback returns.
CREATE TABLE canary_targets (
    tenant_id text NOT NULL,
    name      text NOT NULL,
    alias     text NOT NULL,
    version   integer NOT NULL,
    weight    integer NOT NULL CHECK (weight BETWEEN 1 AND 1000000),
    PRIMARY KEY (tenant_id, name, alias, version),
    FOREIGN KEY (tenant_id, name, alias) REFERENCES aliases ON DELETE CASCADE,
    FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions DEFERRABLE INITIALLY DEFERRED
);
CREATE INDEX canary_targets_version ON canary_targets (tenant_id, name, version);

ALTER TABLE aliases
    ADD COLUMN policy jsonb,                          -- when a canary is rolled back by itself
    ADD COLUMN pinned boolean NOT NULL DEFAULT false, -- its versions stay on the device, within tenants.pin_bytes
    ADD COLUMN change bigint;                         -- alias_history.id of the last move
ALTER TABLE alias_history
    ADD COLUMN canary jsonb, -- {version: weight} of the new target; null: the version alone
    ADD COLUMN policy jsonb,
    ADD COLUMN reason text NOT NULL DEFAULT 'promote'
        CHECK (reason IN ('first', 'upload', 'promote', 'canary', 'rollback', 'auto_rollback', 'deleted')),
    ADD COLUMN detail text;
ALTER TABLE tenants ADD COLUMN pin_bytes bigint NOT NULL DEFAULT 0 CHECK (pin_bytes >= 0);

-- The one way an alias moves. `to_canary` is {version: weight} or null. `if_change`: only if the last move is still that
-- one. Returns the id of the history row, null if nothing was to be done.
CREATE FUNCTION point_alias(
    of_tenant text, of_name text, of_alias text, to_version integer, to_canary jsonb, with_policy jsonb,
    by_key text, why text, why_detail text, if_change bigint
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    was      aliases%ROWTYPE;
    split    jsonb;
    made     bigint;
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    SELECT * INTO was FROM aliases WHERE (tenant_id, name, alias) = (of_tenant, of_name, of_alias);
    IF if_change IS NOT NULL AND was.change IS DISTINCT FROM if_change THEN
        RETURN NULL;
    END IF;
    SELECT jsonb_object_agg(version::text, weight) INTO split
        FROM canary_targets WHERE (tenant_id, name, alias) = (of_tenant, of_name, of_alias);
    IF was.version = to_version AND split IS NOT DISTINCT FROM to_canary
        AND was.policy IS NOT DISTINCT FROM with_policy THEN
        RETURN NULL;
    END IF;
    INSERT INTO alias_history (tenant_id, name, alias, version, canary, policy, previous, changed_by, reason, detail)
        VALUES (of_tenant, of_name, of_alias, to_version, to_canary, with_policy, was.version, by_key, why, why_detail)
        RETURNING id INTO made;
    INSERT INTO aliases (tenant_id, name, alias, version, policy, change)
        VALUES (of_tenant, of_name, of_alias, to_version, with_policy, made)
        ON CONFLICT (tenant_id, name, alias) DO UPDATE
        SET version = excluded.version, policy = excluded.policy, change = excluded.change;
    DELETE FROM canary_targets WHERE (tenant_id, name, alias) = (of_tenant, of_name, of_alias);
    INSERT INTO canary_targets (tenant_id, name, alias, version, weight)
        SELECT of_tenant, of_name, of_alias, key::integer, value::integer
        FROM jsonb_each_text(coalesce(to_canary, '{}'));
    RETURN made;
END $$;

-- What the tenant's pinned aliases keep on the device, canary targets too.
CREATE FUNCTION pinned_bytes(of_tenant text) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(bytes), 0)::bigint FROM (
        SELECT DISTINCT v.name, v.version, (v.manifest ->> 'file_bytes')::bigint AS bytes
        FROM aliases a
        LEFT JOIN canary_targets t USING (tenant_id, name, alias)
        JOIN adapter_versions v ON (v.tenant_id, v.name) = (a.tenant_id, a.name) AND v.version IN (a.version, t.version)
        WHERE a.tenant_id = of_tenant AND a.pinned
    ) pinned
$$;

-- The one way a version becomes ready. The first takes `prod`; the alias its upload wanted follows unless it has been
-- moved on purpose or by a newer upload since, or the tenant's pins would not fit: then `wanted_alias` stays.
-- False if the version is not proving.
CREATE FUNCTION version_ready(of_tenant text, of_name text, of_version integer) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    made adapter_versions%ROWTYPE;
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    -- A statement's own bump is not seen by itself, hence + 1; nobody sees the state between.
    UPDATE adapter_versions SET state = 'ready', ready_generation = (SELECT generation + 1 FROM catalog_generation)
        WHERE (tenant_id, name, version) = (of_tenant, of_name, of_version) AND state = 'proving'
        RETURNING * INTO made;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM version_proving WHERE (tenant_id, name, version) = (of_tenant, of_name, of_version);
    IF NOT EXISTS (SELECT FROM aliases WHERE (tenant_id, name, alias) = (of_tenant, of_name, 'prod')) THEN
        PERFORM point_alias(
            of_tenant, of_name, 'prod', of_version, NULL, NULL, made.uploaded_by, 'first', NULL, NULL);
    END IF;
    IF made.wanted_alias IS NOT NULL AND NOT EXISTS (
        SELECT FROM alias_history
        WHERE (tenant_id, name, alias) = (of_tenant, of_name, made.wanted_alias) AND changed_at > made.created_at
            AND (reason NOT IN ('first', 'upload') OR version > of_version))
    THEN
        BEGIN
            PERFORM point_alias(
                of_tenant, of_name, made.wanted_alias, of_version, NULL, NULL, made.uploaded_by, 'upload', NULL, NULL);
            IF pinned_bytes(of_tenant) > (SELECT pin_bytes FROM tenants WHERE id = of_tenant) THEN
                RAISE EXCEPTION 'over the pin quota' USING ERRCODE = 'LPX01';
            END IF;
            UPDATE adapter_versions SET wanted_alias = NULL
                WHERE (tenant_id, name, version) = (of_tenant, of_name, of_version);
        EXCEPTION WHEN SQLSTATE 'LPX01' THEN
            NULL;
        END;
    END IF;
    RETURN true;
END $$;

-- Keeps the proof, which makes every version of this content ready. False if the version is not proving any more.
CREATE FUNCTION version_proved(
    of_tenant text, of_name text, of_version integer,
    in_layout text, with_checksum text, with_fingerprint jsonb, by_worker text
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    content text;
    base    text;
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    SELECT v.digest, b.digest INTO content, base
        FROM adapter_versions v JOIN base_models b ON b.name = v.base_name
        WHERE (v.tenant_id, v.name, v.version) = (of_tenant, of_name, of_version) AND v.state = 'proving';
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO adapter_proofs (digest, base_digest, layout, checksum, fingerprint, worker)
        VALUES (content, base, in_layout, with_checksum, with_fingerprint, by_worker)
        ON CONFLICT DO NOTHING;
    PERFORM version_ready(v.tenant_id, v.name, v.version)
        FROM adapter_versions v JOIN base_models b ON b.name = v.base_name
        WHERE (v.digest, b.digest, v.state) = (content, base, 'proving')
        ORDER BY v.tenant_id, v.name, v.version;
    RETURN true;
END $$;

-- Contents that perhaps no version names: on their way into the store (held by their uploader while `due` is ahead), or
-- left by a version that went (holder ''). One that nobody holds and no version names is removed from the store.
CREATE TABLE loose_contents (
    digest content_digest NOT NULL,
    holder text NOT NULL,
    due    timestamptz NOT NULL,
    PRIMARY KEY (digest, holder)
);

-- Of a version that was proved wrong only the row remains. False if the version is not proving any more.
CREATE FUNCTION version_rejected(of_tenant text, of_name text, of_version integer, because jsonb)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    content text;
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    UPDATE adapter_versions SET state = 'rejected', error = because
        WHERE (tenant_id, name, version) = (of_tenant, of_name, of_version) AND state = 'proving'
        RETURNING digest INTO content;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM version_proving WHERE (tenant_id, name, version) = (of_tenant, of_name, of_version);
    INSERT INTO loose_contents (digest, holder, due) VALUES (content, '', now()) ON CONFLICT DO NOTHING;
    RETURN true;
END $$;

-- What each gateway last said: the catalog it serves from, and its requests in flight by version
-- ({"<tenant id>/<name>/<version>": count}). Its first row is there before it serves.
CREATE TABLE gateways (
    id         text PRIMARY KEY,
    generation bigint NOT NULL,
    in_flight  jsonb NOT NULL DEFAULT '{}',
    started_at timestamptz NOT NULL DEFAULT now(),
    seen_at    timestamptz NOT NULL DEFAULT now()
);

-- Outcomes of the versions of a canary set since it was made, in buckets of time. `ttft` counts answers by time to first
-- token: its n-th entry (from 1) those up to 2 ^ (n / 4) / 4 milliseconds.
CREATE TABLE version_outcomes (
    change     bigint NOT NULL REFERENCES alias_history ON DELETE CASCADE, -- the move that made the set
    version    integer NOT NULL,
    bucket     timestamptz NOT NULL,
    gateway_id text NOT NULL,
    requests   integer NOT NULL,
    errors     integer NOT NULL,
    ttft       integer[] NOT NULL,
    PRIMARY KEY (change, version, bucket, gateway_id)
);
CREATE INDEX version_outcomes_bucket ON version_outcomes (bucket);

-- Adapters that a worker could not load when it last tried.
CREATE TABLE adapter_faults (
    digest  content_digest NOT NULL,
    worker  text NOT NULL,
    code    text NOT NULL,
    message text NOT NULL,
    since   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (digest, worker)
);

DO $$
DECLARE
    changed text;
BEGIN
    FOREACH changed IN ARRAY ARRAY['adapter_proofs', 'approved_templates', 'canary_targets']
    LOOP
        EXECUTE format('CREATE TRIGGER a_bump BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %I
                        FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog()', changed);
    END LOOP;
END $$;

-- The schema of 0.1.0: roles, types, tables, functions, triggers, policies and rights.
--
-- The owner of the schema migrates. Gateways and the admin plane work as loraplex_app, and each of their connections
-- or transactions sets `loraplex.tenant` to the rows that it may see: the id of a tenant, '*' for all, or nothing for
-- none. A later migration that creates a table grants what the planes need of it, and gives it a policy or a reason to
-- have none: tests/admin/http/test_isolation.py asks for one of the two.

-- Roles belong to the cluster, so that another database may have created it, or be creating it now.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'loraplex_app') THEN
        CREATE ROLE loraplex_app NOLOGIN;
    END IF;
EXCEPTION
    WHEN duplicate_object OR unique_violation THEN
        -- Another database's migration has just created it. A first look at a catalog makes this session notice.
        PERFORM FROM pg_auth_members LIMIT 1;
    WHEN insufficient_privilege THEN
        RAISE EXCEPTION 'there is no role loraplex_app and % may not create it', CURRENT_USER
            USING ERRCODE = 'insufficient_privilege', HINT = 'See docs/operate/postgres.md.';
END $$;

-- One URL is enough, because the owner's connections can become loraplex_app. An owner that may grant a role may not
-- always become it, hence the attempt.
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

-- No '/' (it separates tenant and adapter) and no '@' (it separates adapter and version or alias).
CREATE DOMAIN entity_name AS text
    CONSTRAINT entity_name_form CHECK (VALUE ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$');
-- Not a number, because name@7 is version 7.
CREATE DOMAIN alias_name AS text
    CONSTRAINT alias_name_form CHECK (VALUE ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$' AND VALUE !~ '^[0-9]+$');
CREATE DOMAIN content_digest AS text
    CONSTRAINT content_digest_form CHECK (VALUE ~ '^[0-9a-f]{64}$');

-- One row. Every statement that changes the catalog bumps it first, which also serialises catalog writers: a trigger
-- that reads after the bump sees what all earlier writers committed.
CREATE TABLE catalog_generation (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    generation bigint NOT NULL
);
INSERT INTO catalog_generation (generation) VALUES (1);

CREATE TABLE tenants (
    id                text PRIMARY KEY CHECK (id ~ '^ten_[0-9A-Za-z]{12}$'),
    name              entity_name NOT NULL UNIQUE CHECK (name !~ '^ten_'),
    sharing_group     entity_name,
    created_at        timestamptz NOT NULL DEFAULT now(),
    pin_bytes         bigint NOT NULL DEFAULT 0 CHECK (pin_bytes >= 0),
    require_signature boolean NOT NULL DEFAULT false
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
    not_before timestamptz,
    models     text[] CHECK (cardinality(models) > 0), -- names that the tenant uses; null: all
    cidrs      cidr[] CHECK (cardinality(cidrs) > 0), -- networks of its users; null: any
    replaces   text, -- id of the key it was rotated from
    family     text, -- id of the key that it was first rotated from, whose limits and totals it shares; null: its own
    CONSTRAINT api_keys_lifetime CHECK (not_before < expires_at),
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
    created_at    timestamptz NOT NULL DEFAULT now(),
    residency     text NOT NULL DEFAULT 'auto' CHECK (residency IN ('auto', 'pinned', 'unloaded')),
    source        text NOT NULL DEFAULT ''
);

CREATE TABLE adapters (
    tenant_id    text NOT NULL REFERENCES tenants ON DELETE CASCADE,
    name         entity_name NOT NULL,
    last_version integer NOT NULL DEFAULT 0, -- newest version ever; numbers are not used twice
    created_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, name)
);
CREATE INDEX adapters_name ON adapters (name);

CREATE TABLE alias_history (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id  text NOT NULL,
    name       text NOT NULL,
    alias      text NOT NULL,
    version    integer NOT NULL,
    previous   integer,
    changed_by text, -- key id
    changed_at timestamptz NOT NULL DEFAULT now(),
    canary     jsonb, -- {version: weight} of the new target; null: the version alone
    policy     jsonb,
    reason     text NOT NULL DEFAULT 'promote'
        CHECK (reason IN ('first', 'upload', 'promote', 'canary', 'rollback', 'auto_rollback', 'deleted')),
    detail     text,
    FOREIGN KEY (tenant_id, name) REFERENCES adapters ON DELETE CASCADE
);
CREATE INDEX alias_history_alias ON alias_history (tenant_id, name, alias, id);

-- Checksum of a content's packed image in a worker's layout, and what the model answers with it. Gateways load it:
-- which image of a content a worker of a layout may serve.
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

-- Chat templates that an admin approved, by the SHA-256 of their text.
CREATE TABLE approved_templates (
    digest      content_digest PRIMARY KEY,
    approved_by text,
    approved_at timestamptz NOT NULL DEFAULT now()
);

-- Contents that perhaps no version names: being stored (held by their uploader until `due`), or left by a deleted
-- version (holder ''). A content without a holder and a version is removed from the store.
CREATE TABLE loose_contents (
    digest content_digest NOT NULL,
    holder text NOT NULL,
    due    timestamptz NOT NULL,
    PRIMARY KEY (digest, holder)
);

-- Last report of each gateway: the catalog that it serves from, and its requests in flight by version
-- ({"<tenant id>/<name>/<version>": count}). A gateway reports before it serves.
CREATE TABLE gateways (
    id         text PRIMARY KEY,
    generation bigint NOT NULL,
    in_flight  jsonb NOT NULL DEFAULT '{}',
    started_at timestamptz NOT NULL DEFAULT now(),
    seen_at    timestamptz NOT NULL DEFAULT now()
);

-- Outcomes of the versions of a canary set since it was made, in buckets of time. `ttft` counts answers by time to
-- first token: its n-th entry (from 1) those up to 2 ^ (n / 4) / 4 milliseconds.
CREATE TABLE version_outcomes (
    change     bigint NOT NULL REFERENCES alias_history ON DELETE CASCADE, -- the move that created the set
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

-- Separate from the keys, because a use does not change the catalog.
CREATE TABLE key_uses (
    key_id       text PRIMARY KEY REFERENCES api_keys ON DELETE CASCADE,
    last_used_at timestamptz NOT NULL
);

-- One chain: each row's hash covers the hash of the row before it. Whoever changes or removes a row must rewrite all
-- following rows; a copy of the newest hash kept elsewhere reveals even that.
CREATE TABLE audit_log (
    seq        bigint PRIMARY KEY,
    at         timestamptz NOT NULL,
    key_id     text NOT NULL, -- key of the request; 'system': not a request
    tenant_id  text, -- tenant of the object; null: the operator's
    action     text NOT NULL,
    object     text NOT NULL,
    details    jsonb NOT NULL,
    request_id text,
    prev       bytea NOT NULL CHECK (length(prev) = 32),
    hash       bytea NOT NULL CHECK (length(hash) = 32),
    address    text -- of the client; null: not a request, or one over a Unix socket
);
CREATE INDEX audit_log_object ON audit_log (object, seq);
CREATE INDEX audit_log_prunes ON audit_log (seq) WHERE action = 'audit.prune';
CREATE INDEX audit_log_tenant ON audit_log (tenant_id, seq);

-- One row for each request. No foreign keys, because usage is owed even if the key, the adapter or the tenant is
-- deleted.
CREATE TABLE usage (
    day               date NOT NULL, -- of admission, UTC
    request_id        text NOT NULL,
    admitted_at       timestamptz NOT NULL,
    tenant_id         text NOT NULL,
    key_id            text NOT NULL,
    model             text NOT NULL, -- served name of the base model
    adapter           text, -- null: the base model alone
    adapter_version   integer,
    prompt_tokens     bigint NOT NULL CHECK (prompt_tokens >= 0),
    cached_tokens     bigint NOT NULL, -- of the prompt
    completion_tokens bigint NOT NULL CHECK (completion_tokens >= 0),
    ttft_ms           double precision,
    duration_ms       double precision NOT NULL,
    finish_reasons    text[] NOT NULL, -- one for each choice; null: not finished
    worker            text NOT NULL,
    trace_id          text,
    status            text NOT NULL CHECK (status IN ('completed', 'failed', 'cancelled')),
    gateway           text NOT NULL DEFAULT '',
    metered_tokens    bigint NOT NULL DEFAULT 0, -- as quotas count them: cached ones by their weight
    cost              bigint NOT NULL DEFAULT 0, -- pico-dollars, at the prices of its admission
    input_cost        bigint NOT NULL DEFAULT 0, -- of computed prompt tokens; the three add up to cost
    cached_input_cost bigint NOT NULL DEFAULT 0,
    output_cost       bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (day, request_id),
    CHECK (cached_tokens BETWEEN 0 AND prompt_tokens)
) PARTITION BY RANGE (day);
CREATE INDEX usage_admitted ON usage (admitted_at);
CREATE INDEX usage_tenant ON usage (tenant_id, admitted_at);

-- Sums of all rows ever loaded, including those of dropped days.
CREATE TABLE usage_hourly (
    hour              timestamptz NOT NULL,
    tenant_id         text NOT NULL,
    model             text NOT NULL,
    adapter           text NOT NULL, -- '': the base model alone
    key_id            text NOT NULL,
    requests          bigint NOT NULL,
    prompt_tokens     bigint NOT NULL,
    cached_tokens     bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    adapter_version   integer NOT NULL DEFAULT 0, -- 0: the base model alone
    metered_tokens    bigint NOT NULL DEFAULT 0,
    cost              numeric NOT NULL DEFAULT 0,
    input_cost        numeric NOT NULL DEFAULT 0,
    cached_input_cost numeric NOT NULL DEFAULT 0,
    output_cost       numeric NOT NULL DEFAULT 0,
    credited          numeric NOT NULL DEFAULT 0, -- taken off `cost` by corrections of a wrong price
    PRIMARY KEY (hour, tenant_id, model, adapter, adapter_version, key_id)
);
CREATE INDEX usage_hourly_tenant ON usage_hourly (tenant_id, hour);

-- One row. Usage of earlier days is no longer loaded, because it is unknown whether it was counted.
CREATE TABLE usage_kept (
    one       boolean PRIMARY KEY DEFAULT true CHECK (one),
    first_day date NOT NULL
);
INSERT INTO usage_kept (first_day) VALUES ('-infinity');

CREATE TABLE quotas (
    subject             text PRIMARY KEY, -- id of the tenant or of the key
    tenant_id           text NOT NULL REFERENCES tenants ON DELETE CASCADE,
    key_id              text REFERENCES api_keys ON DELETE CASCADE, -- null: limits of the tenant
    -- null: no limit of its own
    requests_per_minute bigint CHECK (requests_per_minute >= 0),
    tokens_per_minute   bigint CHECK (tokens_per_minute >= 0),
    concurrent_requests bigint CHECK (concurrent_requests >= 0),
    tokens_per_day      bigint CHECK (tokens_per_day >= 0),
    tokens_per_month    bigint CHECK (tokens_per_month >= 0),
    spend_per_day       bigint CHECK (spend_per_day >= 0), -- pico-dollars
    spend_per_month     bigint CHECK (spend_per_month >= 0),
    adapters            bigint CHECK (adapters >= 0),
    adapter_bytes       bigint CHECK (adapter_bytes >= 0), -- each content once
    cached_weight       smallint NOT NULL DEFAULT 100 CHECK (cached_weight BETWEEN 0 AND 100), -- percent of a token
    updated_at          timestamptz NOT NULL DEFAULT now(),
    weight              smallint NOT NULL DEFAULT 1 CHECK (weight BETWEEN 1 AND 1000), -- share of a busy worker
    class               text NOT NULL DEFAULT 'standard' CHECK (class IN ('interactive', 'standard', 'batch')),
    CHECK (subject = coalesce(key_id, tenant_id)),
    CHECK (key_id IS NULL OR num_nonnulls(adapters, adapter_bytes) = 0 AND cached_weight = 100),
    CONSTRAINT quotas_service CHECK (key_id IS NULL OR weight = 1 AND class = 'standard')
);
CREATE INDEX quotas_key ON quotas (key_id);
CREATE INDEX quotas_tenant ON quotas (tenant_id);

-- A price in micro-dollars per million tokens is the same number of pico-dollars per token. A model without one is
-- free.
CREATE TABLE prices (
    model        entity_name PRIMARY KEY REFERENCES base_models ON DELETE CASCADE,
    input        bigint NOT NULL CHECK (input BETWEEN 0 AND 1000000000000), -- pico-dollars per token
    cached_input bigint NOT NULL,
    output       bigint NOT NULL CHECK (output BETWEEN 0 AND 1000000000000),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    CHECK (cached_input BETWEEN 0 AND input)
);

-- Loaded usage of a tenant or a key by day and month.
CREATE TABLE usage_totals (
    subject        text NOT NULL,
    span           text NOT NULL CHECK (span IN ('day', 'month')),
    start          date NOT NULL,
    metered_tokens bigint NOT NULL,
    cost           numeric NOT NULL,
    PRIMARY KEY (subject, span, start)
);
CREATE INDEX usage_totals_start ON usage_totals (start);

-- Gateways that hold shares of limits. After `until` a silent gateway no longer grants anything; see quota_counts.
CREATE TABLE quota_holders (
    gateway_id text PRIMARY KEY,
    seen_at    timestamptz NOT NULL,
    until      timestamptz NOT NULL,
    exchange   bigint NOT NULL, -- number of the last one
    answer     jsonb NOT NULL   -- the answer to it, for a gateway that did not receive it
);
-- Holds what gateways that have ended held of minutes. It is never seen and never expires.
INSERT INTO quota_holders (gateway_id, seen_at, until, exchange, answer) VALUES ('', '-infinity', 'infinity', 0, '[]');

-- Share of a limit that a gateway may grant by itself: what it has promised, what it has used and not loaded yet, and
-- what it holds ready. For each limit, loaded use and all shares are at most the limit, unless it was lowered since.
CREATE TABLE quota_leases (
    subject    text NOT NULL,
    kind       text NOT NULL, -- column of quotas
    start      timestamptz NOT NULL, -- of the minute, day or month; '-infinity': of all time
    gateway_id text NOT NULL REFERENCES quota_holders ON DELETE CASCADE,
    granted    bigint NOT NULL,
    answered   bigint NOT NULL DEFAULT 0, -- newest call to return shares that it has answered
    PRIMARY KEY (subject, kind, start, gateway_id)
);
CREATE INDEX quota_leases_gateway ON quota_leases (gateway_id);

-- Answers of creates that clients may repeat, by the header Idempotency-Key. It has no secret: the text of a new API
-- key follows from `nonce`, the pepper, and the header, of which only a keyed hash is stored. Once the row is deleted,
-- that text cannot be derived again.
CREATE TABLE idempotent_requests (
    id         bytea PRIMARY KEY CHECK (length(id) = 32), -- keyed hash of the caller's key id and the header
    request    bytea NOT NULL CHECK (length(request) = 32), -- hash of method, path, query and body
    nonce      bytea NOT NULL CHECK (length(nonce) = 32),
    answer     text, -- null only inside the creating transaction
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX idempotent_requests_age ON idempotent_requests (created_at);

-- A worker is one process; after a restart it is another. Some register their address under a lease that they renew;
-- the others are in the settings of gateways. Gateways report the status of the workers that they are connected to.
CREATE TABLE workers (
    id            text PRIMARY KEY CHECK (length(id) BETWEEN 1 AND 256),
    address       text NOT NULL CHECK (length(address) BETWEEN 1 AND 512),
    registered_at timestamptz NOT NULL DEFAULT now(),
    leased_until  timestamptz, -- null: not registered
    draining      boolean, -- wanted state; null: never requested
    status        jsonb,
    reported_at   timestamptz,
    reported_by   text, -- gateway id
    failure       text NOT NULL DEFAULT '', -- why a gateway does not reach it, from the last that tried
    CONSTRAINT workers_reachable CHECK (
        leased_until IS NULL OR address ~ '^unix:/.'
        OR address ~ '^tcp://.+:[0-9]{1,5}$' AND substring(address FROM '[0-9]+$')::numeric < 65536)
);

-- Generation of the last change of each tenant and adapter: gateways load only what has changed.
CREATE TABLE catalog_changes (
    tenant_id  text NOT NULL, -- kept after the tenant is deleted, so that gateways drop it
    generation bigint NOT NULL, -- of the catalog at its last change
    name       text NOT NULL DEFAULT '', -- of the adapter; '': the tenant without its adapters
    PRIMARY KEY (tenant_id, name)
);
CREATE INDEX catalog_changes_generation ON catalog_changes (generation);

-- Uploads that were refused before they became a version. Few of each tenant are kept, for a short time.
CREATE TABLE rejected_uploads (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants ON DELETE CASCADE,
    name        entity_name NOT NULL,
    error       jsonb NOT NULL,
    uploaded_by text, -- key id
    rejected_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX rejected_uploads_tenant ON rejected_uploads (tenant_id, id);

-- Load of each gateway in its last minute, for `loraplex top` and `loraplex status`.
CREATE TABLE gateway_load (
    gateway_id  text PRIMARY KEY REFERENCES gateways ON DELETE CASCADE,
    reported_at timestamptz NOT NULL DEFAULT now(),
    load        jsonb NOT NULL -- store/gateway_load.py
);

-- Public keys with which tenants sign their adapters.
CREATE TABLE signing_keys (
    id         text PRIMARY KEY CHECK (id ~ '^sig_[0-9A-Za-z]{12}$'),
    tenant_id  text NOT NULL REFERENCES tenants ON DELETE CASCADE,
    name       entity_name NOT NULL,
    public_key bytea NOT NULL CHECK (length(public_key) = 32), -- ed25519
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz,
    UNIQUE (tenant_id, id),
    UNIQUE (tenant_id, public_key)
);

-- A version is its weights and its serving data; another of either makes another version. A retired version serves
-- only the requests that have it; its row is deleted when no gateway that has seen the retirement has one in flight.
CREATE TABLE adapter_versions (
    tenant_id          text NOT NULL,
    name               text NOT NULL,
    version            integer NOT NULL CHECK (version > 0),
    state              text NOT NULL
        CHECK (state IN ('uploading', 'validating', 'proving', 'ready', 'rejected', 'retired')),
    digest             content_digest,
    base_name          text REFERENCES base_models,
    manifest           jsonb,
    error              jsonb,
    created_at         timestamptz NOT NULL DEFAULT now(),
    serving            jsonb NOT NULL DEFAULT '{}',
    wanted_alias       alias_name, -- points to the version once it is ready, then null
    uploaded_by        text, -- key id
    ready_generation   bigint, -- a gateway at this generation serves it
    retired_at         timestamptz,
    retired_generation bigint, -- a gateway at this generation starts no request with it
    expires_at         timestamptz, -- of an ephemeral version, which retires by itself
    signed_by          text, -- of the content; a later upload may have another signature
    signature          bytea CHECK (length(signature) = 64),
    PRIMARY KEY (tenant_id, name, version),
    CONSTRAINT adapter_versions_complete CHECK (
        CASE WHEN state IN ('proving', 'ready') THEN num_nonnulls(digest, base_name, manifest) = 3 AND error IS NULL
             WHEN state = 'rejected' THEN error IS NOT NULL
             WHEN state = 'retired' THEN retired_at IS NOT NULL AND retired_generation IS NOT NULL
             ELSE true END),
    CONSTRAINT adapter_versions_signed CHECK (num_nulls(signed_by, signature) IN (0, 2)),
    CONSTRAINT adapter_versions_signed_by_fkey
        FOREIGN KEY (tenant_id, signed_by) REFERENCES signing_keys (tenant_id, id),
    FOREIGN KEY (tenant_id, name) REFERENCES adapters ON DELETE CASCADE
);
CREATE INDEX adapter_versions_base ON adapter_versions (base_name);
CREATE UNIQUE INDEX adapter_versions_content ON adapter_versions (tenant_id, name, base_name, digest, md5(serving::text))
    WHERE state IN ('proving', 'ready') AND expires_at IS NULL;
CREATE INDEX adapter_versions_digest ON adapter_versions (digest);
CREATE INDEX adapter_versions_ephemeral ON adapter_versions (expires_at)
    WHERE state = 'ready' AND expires_at IS NOT NULL;
CREATE INDEX adapter_versions_rejected ON adapter_versions (tenant_id, created_at) WHERE state = 'rejected';
CREATE INDEX adapter_versions_signed ON adapter_versions (tenant_id, signed_by) WHERE signed_by IS NOT NULL;
CREATE INDEX adapter_versions_unsettled ON adapter_versions (state) WHERE state IN ('proving', 'retired');

CREATE TABLE aliases (
    tenant_id text NOT NULL,
    name      text NOT NULL,
    alias     alias_name NOT NULL,
    version   integer NOT NULL,
    policy    jsonb, -- conditions of an automatic rollback
    pinned    boolean NOT NULL DEFAULT false, -- versions stay on the device, within tenants.pin_bytes
    change    bigint, -- alias_history.id of the last move
    PRIMARY KEY (tenant_id, name, alias),
    FOREIGN KEY (tenant_id, name) REFERENCES adapters ON DELETE CASCADE,
    FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions DEFERRABLE INITIALLY DEFERRED
);
CREATE INDEX aliases_version ON aliases (tenant_id, name, version);

-- One row for each version in state proving: the gateway that has it proved, and why that failed so far.
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

-- Targets of an alias that is a canary set: requests are split over them by weight. `aliases.version` is the stable
-- one, to which a rollback returns.
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

-- Proof of each version. `adapter_proofs` is not shown to tenants, because it would reveal another tenant's upload of
-- the same bytes.
CREATE TABLE version_proofs (
    tenant_id   text NOT NULL,
    name        text NOT NULL,
    version     integer NOT NULL,
    base_digest content_digest NOT NULL,
    layout      text NOT NULL,
    checksum    content_digest NOT NULL,
    fingerprint jsonb NOT NULL,
    worker      text NOT NULL,
    proved_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, name, version, base_digest, layout),
    FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions ON DELETE CASCADE
);

-- Corrections of a wrong price in recorded usage.
CREATE TABLE usage_credits (
    id           entity_name PRIMARY KEY, -- chosen by the client, so that a repeat changes nothing
    model        text NOT NULL, -- no foreign key, as in usage
    tenant_id    text, -- null: every tenant
    since        timestamptz NOT NULL,
    until        timestamptz NOT NULL,
    input        bigint NOT NULL, -- the right price, as in prices
    cached_input bigint NOT NULL,
    output       bigint NOT NULL,
    reason       text NOT NULL CHECK (length(reason) BETWEEN 1 AND 1000),
    requests     bigint NOT NULL,
    cost_before  numeric NOT NULL, -- pico-dollars
    cost_after   numeric NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    CHECK (since < until)
);

CREATE FUNCTION bump_catalog() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    now_at bigint;
BEGIN
    UPDATE catalog_generation SET generation = generation + 1 RETURNING generation INTO now_at;
    PERFORM pg_notify('loraplex_catalog', now_at::text);
    RETURN NULL;
END $$;

CREATE FUNCTION keep_version_immutable() RETURNS trigger LANGUAGE plpgsql AS $$
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

-- Moves an alias. `to_canary` is {version: weight} or null. With `if_change`, only if that was the last move. Returns
-- the id of the history row, or null if nothing was to be done.
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

-- Returns the bytes that the tenant's pinned aliases keep on the device, including canary targets.
CREATE FUNCTION pinned_bytes(of_tenant text) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(bytes), 0)::bigint FROM (
        SELECT DISTINCT v.name, v.version, (v.manifest ->> 'file_bytes')::bigint AS bytes
        FROM aliases a
        LEFT JOIN canary_targets t USING (tenant_id, name, alias)
        JOIN adapter_versions v ON (v.tenant_id, v.name) = (a.tenant_id, a.name) AND v.version IN (a.version, t.version)
        WHERE a.tenant_id = of_tenant AND a.pinned
    ) pinned
$$;

-- Makes a version ready. Returns false if the version is not proving.
CREATE FUNCTION version_ready(of_tenant text, of_name text, of_version integer)
RETURNS boolean LANGUAGE plpgsql AS $$
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
    IF version_state(made.state, made.serving) = 'ready' THEN
        PERFORM version_takes_aliases(made);
    END IF;
    RETURN true;
END $$;

-- Records a proof and makes this version ready, but no other version of the same content. Returns false if the version
-- is no longer proving.
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
    INSERT INTO version_proofs (tenant_id, name, version, base_digest, layout, checksum, fingerprint, worker)
        VALUES (of_tenant, of_name, of_version, base, in_layout, with_checksum, with_fingerprint, by_worker)
        ON CONFLICT DO NOTHING;
    RETURN version_ready(of_tenant, of_name, of_version);
END $$;

-- Rejects a version that failed its proof; only its row remains. Returns false if the version is no longer proving.
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

-- The length comes first, so that no two lists of fields read the same. Null is not the empty text.
CREATE FUNCTION audit_field(value text) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN value IS NULL THEN '\x00'::bytea
                ELSE '\x01'::bytea || int4send(octet_length(convert_to(value, 'UTF8'))) || convert_to(value, 'UTF8') END
$$;

-- The transaction's settings loraplex.key_id, loraplex.request_id and loraplex.address name the actor. The catalog's
-- lock, which most changes hold already, makes it one chain. The hash covers an address only where there is one:
-- fields have their length, so that no row without an address reads like one with it.
CREATE FUNCTION audit_chain() RETURNS trigger LANGUAGE plpgsql AS $$
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

-- Only audit_prune sets `loraplex.prunes_audit`, and only the owner may delete a row.
CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('loraplex.prunes_audit', true) = 'yes' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'the audit log only grows' USING ERRCODE = 'integrity_constraint_violation';
END $$;

-- Writes an audit row for each row that a statement changed, in its transaction. Arguments: the kind of row; the
-- columns that name it, joined by '@'; the columns that are not logged, such as secrets, large ones and those that
-- only mirror others. Rows deleted with their tenant are covered by the tenant's row.
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

CREATE FUNCTION usage_make_partition(of_day date) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    made text := format('usage_%s', to_char(of_day, 'YYYYMMDD'));
BEGIN
    IF to_regclass(made) IS NOT NULL THEN
        RETURN;
    END IF;
    PERFORM FROM usage_kept FOR UPDATE; -- one at a time
    -- Not to_regclass: it may remember from before the wait that there is none.
    IF NOT EXISTS (SELECT FROM pg_class WHERE relname = made) THEN
        -- Made first and then attached, which keeps nobody from reading or loading.
        EXECUTE format('CREATE TABLE %I (LIKE usage INCLUDING ALL)', made);
        EXECUTE format('ALTER TABLE usage ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', made, of_day, of_day + 1);
    END IF;
END $$;

-- Drops the days before `of_day` and returns their number.
CREATE FUNCTION usage_drop_before(of_day date) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    doomed  text;
    dropped integer := 0;
BEGIN
    PERFORM set_config('lock_timeout', '5s', true);
    UPDATE usage_kept SET first_day = greatest(first_day, of_day);
    FOR doomed IN
        SELECT inhrelid::regclass::text FROM pg_inherits
        WHERE inhparent = 'usage'::regclass
            AND inhrelid::regclass::text < format('usage_%s', to_char(of_day, 'YYYYMMDD'))
        ORDER BY 1
    LOOP
        EXECUTE format('DROP TABLE %s', doomed);
        dropped := dropped + 1;
    END LOOP;
    RETURN dropped;
END $$;

CREATE SEQUENCE quota_calls;

-- Returns whether a gateway's share of a limit still counts. A share of a minute does until the minute is over. One of
-- a day or a month does for another hour, or until the gateway's log is loaded: the gateway may have used what is not
-- loaded yet.
CREATE FUNCTION quota_counts(kind text, until timestamptz) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT split_part(kind, '_per_', 2) = 'minute'
        OR until > now() - CASE WHEN split_part(kind, '_per_', 2) IN ('day', 'month') THEN interval '1 hour'
                                ELSE interval '0' END
$$;

-- Exchanges shares of limits with a gateway, which numbers its exchanges from 1. The same number again gets the same
-- answer and changes nothing. Returns null if the gateway was silent for so long that it holds nothing. For each limit
-- in `asks`, [{subject, kind, start, taken, returned, answered, need, want, call}], it adds what was `taken` without
-- asking, takes back what is `returned`, records the call that this answers, then grants `need` or nothing, and up to
-- `want` or a fair share if there is enough. If `need` is not available, the other gateways are called to return what
-- they do not use; asked again with that `call`, `unanswered` is the number that have not answered it yet. The answer
-- is [{granted, remaining, unanswered, call}], with `remaining` null if the limit no longer exists.
CREATE FUNCTION quota_exchange(of_gateway text, number bigint, lifetime interval, asks jsonb)
RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    holder     quota_holders%ROWTYPE;
    holders    bigint;
    ask        record;
    of_all     bigint;
    spoken_for numeric; -- used or held
    free       numeric; -- of who owes more than he may, less than any bigint
    gift       bigint;
    calling    bigint;
    missing    bigint;
    kept       bigint; -- by this gateway, as far as it still counts as its own
    answers    jsonb[] := array_fill(NULL::jsonb, ARRAY[jsonb_array_length(asks)]);
BEGIN
    SELECT * INTO holder FROM quota_holders WHERE gateway_id = of_gateway FOR UPDATE;
    IF holder.exchange = number THEN
        UPDATE quota_holders SET seen_at = now(), until = now() + lifetime WHERE gateway_id = of_gateway;
        RETURN holder.answer;
    ELSIF coalesce(holder.exchange, 0) + 1 <> number THEN
        RETURN NULL;
    ELSIF holder.exchange IS NULL THEN
        INSERT INTO quota_holders VALUES (of_gateway, now(), now() + lifetime, 0, '[]');
    END IF;
    -- One exchange at a time for each limit; all in one order.
    PERFORM FROM quotas WHERE subject IN (SELECT a ->> 'subject' FROM jsonb_array_elements(asks) a)
        ORDER BY subject FOR UPDATE;
    SELECT count(*) INTO holders FROM quota_holders WHERE seen_at > now() - interval '5 seconds' OR gateway_id = of_gateway;
    FOR ask IN
        SELECT r.*, given ->> 'start' AS start_text, place
        FROM jsonb_array_elements(asks) WITH ORDINALITY AS a (given, place),
            jsonb_to_record(given) AS r (
                subject text, kind text, start timestamptz, taken bigint, returned bigint, answered bigint,
                need bigint, want bigint, call bigint)
        ORDER BY subject, kind, start -- as the loading of usage locks them
    LOOP
        SELECT (to_jsonb(q) ->> ask.kind)::bigint INTO of_all FROM quotas q WHERE q.subject = ask.subject;
        -- In one statement: what is loaded between two would be missed or counted twice.
        SELECT coalesce((
                SELECT CASE WHEN starts_with(ask.kind, 'tokens') THEN t.metered_tokens ELSE t.cost END
                FROM usage_totals t
                WHERE t.subject = ask.subject AND t.span = split_part(ask.kind, '_per_', 2)
                    AND t.start = (ask.start AT TIME ZONE 'UTC')::date), 0)
            + coalesce((
                SELECT sum(l.granted) FROM quota_leases l JOIN quota_holders h USING (gateway_id)
                WHERE (l.subject, l.kind, l.start) = (ask.subject, ask.kind, ask.start)
                    AND (quota_counts(l.kind, h.until) OR h.gateway_id = of_gateway)), 0)
            INTO spoken_for;
        SELECT granted INTO kept FROM quota_leases l
            WHERE (l.subject, l.kind, l.start, l.gateway_id) = (ask.subject, ask.kind, ask.start, of_gateway);
        ask.returned := least(ask.returned, greatest(coalesce(kept, 0) + ask.taken, 0));
        free := of_all - spoken_for - ask.taken + ask.returned;
        gift := CASE
            WHEN of_all IS NULL OR ask.need > free OR ask.need + ask.want = 0 THEN 0
            ELSE greatest(0, least(free, greatest(ask.want, ask.need, div(free, 2 * holders)))) END;
        IF gift > 0 OR ask.taken > 0 OR ask.returned > 0 THEN
            INSERT INTO quota_leases AS l (subject, kind, start, gateway_id, granted, answered)
                -- Who is given more may be called again.
                VALUES (ask.subject, ask.kind, ask.start, of_gateway, gift + ask.taken - ask.returned,
                        CASE WHEN gift > 0 THEN 0 ELSE ask.answered END)
                ON CONFLICT (subject, kind, start, gateway_id) DO UPDATE
                SET granted = l.granted + excluded.granted,
                    answered = CASE WHEN gift > 0 THEN 0 ELSE greatest(l.answered, excluded.answered) END;
        ELSIF ask.answered > 0 THEN
            UPDATE quota_leases l SET answered = greatest(l.answered, ask.answered)
                WHERE (l.subject, l.kind, l.start, l.gateway_id) = (ask.subject, ask.kind, ask.start, of_gateway);
        END IF;
        calling := ask.call;
        missing := 0;
        IF ask.need > gift AND ask.need <= of_all THEN
            IF calling = 0 THEN
                calling := nextval('quota_calls');
            END IF;
            -- Nobody waits for one that is not heard of: what it holds counts as promised.
            SELECT count(*) INTO missing FROM quota_leases l JOIN quota_holders h USING (gateway_id)
                WHERE (l.subject, l.kind, l.start) = (ask.subject, ask.kind, ask.start)
                    AND l.gateway_id <> of_gateway AND l.granted > 0 AND l.answered < calling
                    AND h.seen_at > now() - interval '5 seconds';
            IF missing > 0 THEN
                PERFORM pg_notify('loraplex_quota', jsonb_build_object(
                    'subject', ask.subject, 'kind', ask.kind, 'start', ask.start_text, 'call', calling)::text);
            END IF;
        END IF;
        answers[ask.place] := jsonb_build_object(
            'granted', gift, 'remaining', free - gift, 'unanswered', missing, 'call', calling);
    END LOOP;
    UPDATE quota_holders SET seen_at = now(), until = now() + lifetime, exchange = number, answer = to_jsonb(answers)
        WHERE gateway_id = of_gateway RETURNING answer INTO holder.answer;
    RETURN holder.answer;
END $$;

-- Deletes shares that no gateway holds any longer. Skips locked rows, so that it never waits for an exchange.
CREATE FUNCTION quota_upkeep() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM quota_holders WHERE NOT quota_counts('any_per_day', until);
    -- A holder that speaks again meanwhile has lost them or has them.
    DELETE FROM quota_leases l USING (SELECT * FROM quota_holders WHERE until <= now() FOR UPDATE SKIP LOCKED) h
        WHERE h.gateway_id = l.gateway_id AND NOT quota_counts(l.kind, h.until);
    DELETE FROM quota_leases
        WHERE ctid = ANY (ARRAY (
            SELECT ctid FROM quota_leases
            WHERE granted = 0
                OR kind IN ('requests_per_minute', 'tokens_per_minute') AND start < now() - interval '2 minutes'
            FOR UPDATE SKIP LOCKED));
    DELETE FROM usage_totals WHERE start < (now() - interval '400 days')::date;
END $$;

-- Returns all there is to know of an API key that was shown, whose tenant is not known before.
CREATE FUNCTION key_by_id(of_id text) RETURNS SETOF api_keys LANGUAGE sql STABLE SECURITY DEFINER AS $$
    SELECT * FROM api_keys WHERE id = of_id
$$;

-- Considers the versions of all tenants, whoever asks, so that no version loses its content.
CREATE FUNCTION content_is_free(of_digest text) RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER AS $$
    SELECT NOT EXISTS (SELECT FROM loose_contents WHERE digest = of_digest AND due > now())
        AND NOT EXISTS (SELECT FROM adapter_versions WHERE digest = of_digest AND state <> 'rejected')
$$;

-- These functions run after a_bump, whose lock orders the changes.
CREATE FUNCTION note_tenant_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT changed.id, generation FROM changed, catalog_generation ORDER BY 1
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

CREATE FUNCTION note_change_of_tenant() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT changed.tenant_id, generation FROM changed, catalog_generation
    WHERE changed.tenant_id IS NOT NULL -- an admin key is nobody's, and always loaded
    ORDER BY 1
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

-- Concerns every tenant that has a version of the content.
CREATE FUNCTION note_proof() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, name, generation)
    SELECT DISTINCT v.tenant_id, v.name, generation
    FROM changed JOIN adapter_versions v USING (digest), catalog_generation ORDER BY 1, 2
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

CREATE FUNCTION note_change_of_adapter() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, name, generation)
    SELECT DISTINCT changed.tenant_id, changed.name, generation FROM changed, catalog_generation ORDER BY 1, 2
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;

-- A minute has no loaded total, so that its shares are the only record of its use: they outlive their gateway. Past
-- minutes go with it.
CREATE FUNCTION keep_minutes() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    WITH gone AS (
        DELETE FROM quota_leases
        WHERE gateway_id = OLD.gateway_id AND granted > 0
            AND split_part(kind, '_per_', 2) = 'minute' AND start > now() - interval '2 minutes'
        RETURNING subject, kind, start, granted
    )
    INSERT INTO quota_leases AS l (subject, kind, start, gateway_id, granted)
        SELECT subject, kind, start, '', granted FROM gone ORDER BY subject, kind, start
        ON CONFLICT (subject, kind, start, gateway_id) DO UPDATE SET granted = l.granted + excluded.granted;
    RETURN OLD;
END $$;

-- Deletes the rows up to `through`, whose hash is `last_hash`, and adds a row to the chain as the checkpoint from
-- which it is verified since. `seal` is a keyed hash of the checkpoint, with a key that is not in the database. Rows
-- younger than 30 days are never deleted.
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

CREATE FUNCTION template_digest(serving jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT encode(sha256(convert_to(serving ->> 'chat_template', 'UTF8')), 'hex')
$$;

-- Returns the state that is shown and used: a proved version is in state ready, also while it waits for an approval.
CREATE FUNCTION version_state(state text, serving jsonb) RETURNS text LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN state = 'ready' AND serving ->> 'chat_template' IS NOT NULL
                    AND NOT EXISTS (SELECT FROM approved_templates WHERE digest = template_digest(serving))
                THEN 'awaiting_approval' ELSE state END
$$;

-- Moves aliases to a version that is ready. The first that differs from its base model takes `prod`. The alias that
-- its upload named follows, unless it was moved on purpose or by a newer upload since, or the tenant's pins would not
-- fit; then `wanted_alias` stays.
CREATE FUNCTION version_takes_aliases(made adapter_versions) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT coalesce((made.manifest ->> 'equals_base')::boolean, false)
        AND NOT EXISTS (SELECT FROM aliases WHERE (tenant_id, name, alias) = (made.tenant_id, made.name, 'prod'))
    THEN
        PERFORM point_alias(
            made.tenant_id, made.name, 'prod', made.version, NULL, NULL, made.uploaded_by, 'first', NULL, NULL);
    END IF;
    IF made.wanted_alias IS NOT NULL AND NOT EXISTS (
        SELECT FROM alias_history
        WHERE (tenant_id, name, alias) = (made.tenant_id, made.name, made.wanted_alias)
            AND changed_at > made.created_at
            AND (reason NOT IN ('first', 'upload') OR version > made.version))
    THEN
        BEGIN
            PERFORM point_alias(
                made.tenant_id, made.name, made.wanted_alias, made.version, NULL, NULL, made.uploaded_by, 'upload',
                NULL, NULL);
            IF pinned_bytes(made.tenant_id) > (SELECT pin_bytes FROM tenants WHERE id = made.tenant_id) THEN
                RAISE EXCEPTION 'over the pin quota' USING ERRCODE = 'LPX01';
            END IF;
            UPDATE adapter_versions SET wanted_alias = NULL
                WHERE (tenant_id, name, version) = (made.tenant_id, made.name, made.version);
        EXCEPTION WHEN SQLSTATE 'LPX01' THEN
            NULL;
        END;
    END IF;
END $$;

-- Approves a chat template. Versions of all tenants that waited for it are ready in the order they came.
CREATE FUNCTION approve_template(of_digest text, by_key text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    waited adapter_versions%ROWTYPE;
BEGIN
    PERFORM generation FROM catalog_generation FOR UPDATE;
    INSERT INTO approved_templates (digest, approved_by) VALUES (of_digest, by_key) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    FOR waited IN
        SELECT * FROM adapter_versions
        WHERE state = 'ready' AND serving ->> 'chat_template' IS NOT NULL AND template_digest(serving) = of_digest
        ORDER BY tenant_id, name, version
    LOOP
        UPDATE adapter_versions SET ready_generation = (SELECT generation + 1 FROM catalog_generation)
            WHERE (tenant_id, name, version) = (waited.tenant_id, waited.name, waited.version);
        PERFORM version_takes_aliases(waited);
    END LOOP;
END $$;

-- Sets the costs of a model's hours to what these prices make them. `raised` is the first hour that would then cost
-- more than when it was recorded. In that case nothing is changed.
CREATE FUNCTION usage_reprice(
    of_model text, of_tenant text, since timestamptz, until timestamptz, price_input bigint,
    price_cached_input bigint, price_output bigint,
    OUT requests bigint, OUT cost_before numeric, OUT cost_after numeric, OUT raised timestamptz)
    LANGUAGE plpgsql AS $$
BEGIN
    -- Loading usage locks totals before hours. Without this lock, each could wait for the other.
    LOCK TABLE usage_totals IN SHARE ROW EXCLUSIVE MODE;
    WITH priced AS (
        SELECT *, new_input + new_cached_input + new_output AS new_cost
        FROM (SELECT h.*, (h.prompt_tokens - h.cached_tokens)::numeric * price_input AS new_input,
                     h.cached_tokens::numeric * price_cached_input AS new_cached_input,
                     h.completion_tokens::numeric * price_output AS new_output
              FROM usage_hourly h
              WHERE h.model = of_model AND h.hour >= since AND h.hour < until
                  AND (of_tenant IS NULL OR h.tenant_id = of_tenant)) hours
    ), sums AS (
        SELECT sum(p.requests)::bigint AS requests, sum(p.cost) AS cost, sum(p.new_cost) AS new_cost,
               min(p.hour) FILTER (WHERE p.new_cost > p.cost + p.credited) AS first_raised
        FROM priced p
    ), changed AS (
        UPDATE usage_hourly h
        SET cost = p.new_cost, input_cost = p.new_input, cached_input_cost = p.new_cached_input,
            output_cost = p.new_output, credited = p.credited + p.cost - p.new_cost
        FROM priced p, sums
        WHERE sums.first_raised IS NULL
            AND (h.hour, h.tenant_id, h.model, h.adapter, h.adapter_version, h.key_id)
                = (p.hour, p.tenant_id, p.model, p.adapter, p.adapter_version, p.key_id)
        RETURNING p.hour, p.tenant_id, p.key_id, p.cost - p.new_cost AS amount
    ), totals AS (
        UPDATE usage_totals t SET cost = t.cost - c.amount
        FROM (SELECT s.subject, p.span, date_trunc(p.span, changed.hour AT TIME ZONE 'UTC')::date AS start,
                     sum(changed.amount) AS amount
              FROM changed LEFT JOIN api_keys k ON k.id = changed.key_id,
                  LATERAL (VALUES (changed.tenant_id), (coalesce(k.family, changed.key_id))) AS s (subject),
                  (VALUES ('day'), ('month')) AS p (span)
              GROUP BY 1, 2, 3) c
        WHERE (t.subject, t.span, t.start) = (c.subject, c.span, c.start)
    )
    SELECT sums.requests, sums.cost, sums.new_cost, sums.first_raised FROM sums
        INTO requests, cost_before, cost_after, raised;
END $$;

-- These functions do more than their caller may. Each finds its tables in this schema, whatever the caller's search
-- path.
DO $$
DECLARE
    privileged regprocedure;
BEGIN
    FOREACH privileged IN ARRAY ARRAY[
        'key_by_id(text)', 'content_is_free(text)',
        'audit_change()', -- alone writes the log, and follows the whole chain, whoever makes the change
        'audit_prune(bigint,text,text)',
        'usage_make_partition(date)', 'usage_drop_before(date)', -- create and drop tables
        -- The author of a change may not see the tenant that it concerns.
        'note_tenant_change()', 'note_change_of_tenant()', 'note_change_of_adapter()', 'note_proof()'
    ]::regprocedure[]
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', privileged, current_schema());
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', privileged);
        IF NOT starts_with(privileged::text, 'note_') THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO loraplex_app', privileged);
        END IF;
    END LOOP;
END $$;

-- Tables that change with traffic do not bump the catalog.
DO $$
DECLARE
    changed text;
    noted   record;
    event   text;
BEGIN
    FOREACH changed IN ARRAY ARRAY[
        'tenants', 'api_keys', 'base_models', 'adapters', 'adapter_versions', 'aliases', 'adapter_proofs',
        'approved_templates', 'canary_targets', 'quotas', 'prices']
    LOOP
        EXECUTE format('CREATE TRIGGER a_bump BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %I
                        FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog()', changed);
    END LOOP;
    FOR noted IN
        SELECT * FROM (VALUES
            ('tenants', 'note_tenant_change'),
            ('api_keys', 'note_change_of_tenant'),
            ('quotas', 'note_change_of_tenant'),
            ('adapter_versions', 'note_change_of_adapter'),
            ('aliases', 'note_change_of_adapter'),
            ('canary_targets', 'note_change_of_adapter'),
            ('adapter_proofs', 'note_proof') -- whose rows go when no version has the content
        ) AS t (name, function)
    LOOP
        FOREACH event IN ARRAY ARRAY['INSERT', 'UPDATE', 'DELETE']
        LOOP
            EXECUTE format(
                'CREATE TRIGGER note_%s AFTER %s ON %I REFERENCING %s TABLE AS changed
                 FOR EACH STATEMENT EXECUTE FUNCTION %I()',
                lower(event), event, noted.name, CASE event WHEN 'DELETE' THEN 'OLD' ELSE 'NEW' END, noted.function);
        END LOOP;
    END LOOP;
END $$;
-- A renewed lease and a status of a worker do not bump the catalog. A row's own bump comes after its change, so that
-- whoever changes rows that others may change at the same time locks the catalog first.
CREATE TRIGGER bump_insert AFTER INSERT ON workers
    FOR EACH ROW WHEN (NEW.leased_until IS NOT NULL) EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER bump_update AFTER UPDATE ON workers
    FOR EACH ROW WHEN (
        (OLD.address, OLD.leased_until IS NULL, OLD.draining)
        IS DISTINCT FROM (NEW.address, NEW.leased_until IS NULL, NEW.draining))
    EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER bump_delete AFTER DELETE ON workers
    FOR EACH ROW WHEN (OLD.leased_until IS NOT NULL OR OLD.draining IS NOT NULL) EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER immutable BEFORE UPDATE ON adapter_versions
    FOR EACH ROW EXECUTE FUNCTION keep_version_immutable();
CREATE TRIGGER names_apart BEFORE INSERT OR UPDATE OF name ON adapters
    FOR EACH ROW EXECUTE FUNCTION keep_names_apart();
CREATE TRIGGER names_apart BEFORE INSERT OR UPDATE OF name ON base_models
    FOR EACH ROW EXECUTE FUNCTION keep_names_apart();
CREATE TRIGGER keep_minutes BEFORE DELETE ON quota_holders FOR EACH ROW EXECUTE FUNCTION keep_minutes();

CREATE TRIGGER chain BEFORE INSERT ON audit_log FOR EACH ROW EXECUTE FUNCTION audit_chain();
CREATE TRIGGER only_grows BEFORE UPDATE OR DELETE OR TRUNCATE ON audit_log
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change();
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
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON quotas
    FOR EACH ROW EXECUTE FUNCTION audit_change('quota', 'subject', 'updated_at');
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON prices
    FOR EACH ROW EXECUTE FUNCTION audit_change('price', 'model', 'updated_at');
CREATE TRIGGER audit AFTER UPDATE OF draining ON workers
    FOR EACH ROW EXECUTE FUNCTION audit_change('worker', 'id', 'leased_until,status,reported_at,reported_by');
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON signing_keys
    FOR EACH ROW EXECUTE FUNCTION audit_change('signing_key', 'id', '');
CREATE TRIGGER audit AFTER INSERT ON usage_credits
    FOR EACH ROW EXECUTE FUNCTION audit_change('credit', 'id', '');

-- The owner sees everything: foreign keys are checked, and privileged functions run, as the owner.
DO $$
DECLARE
    -- In a subquery it is read once for each statement, not for each row.
    scope   text := '(SELECT current_setting(''loraplex.tenant'', true))';
    guarded record;
BEGIN
    FOR guarded IN
        SELECT * FROM (VALUES
            ('tenants', 'id = %1$s'),
            ('api_keys', 'tenant_id = %1$s'), -- admin keys belong to no tenant: seen with '*' alone
            ('adapters', 'tenant_id = %1$s'),
            ('adapter_versions', 'tenant_id = %1$s'),
            ('version_proving', 'tenant_id = %1$s'),
            ('version_proofs', 'tenant_id = %1$s'),
            ('rejected_uploads', 'tenant_id = %1$s'),
            ('aliases', 'tenant_id = %1$s'),
            ('alias_history', 'tenant_id = %1$s'),
            ('canary_targets', 'tenant_id = %1$s'),
            ('signing_keys', 'tenant_id = %1$s'),
            ('audit_log', 'tenant_id = %1$s'),
            ('quotas', 'tenant_id = %1$s'),
            ('catalog_changes', 'tenant_id = %1$s'),
            ('usage', 'tenant_id = %1$s'), -- its partitions need none: they are reached only through it
            ('usage_hourly', 'tenant_id = %1$s'),
            -- As the rows that they belong to, whose own policy decides.
            ('key_uses', 'EXISTS (SELECT FROM api_keys k WHERE k.id = key_uses.key_id)'),
            ('version_outcomes', 'EXISTS (SELECT FROM alias_history h WHERE h.id = version_outcomes.change)'),
            ('usage_totals', 'subject = %1$s OR EXISTS (SELECT FROM api_keys k WHERE k.id = usage_totals.subject)'),
            ('quota_leases', 'subject = %1$s OR EXISTS (SELECT FROM api_keys k WHERE k.id = quota_leases.subject)'),
            ('quota_holders', 'false'), -- a gateway's row is about all tenants at once
            -- The operators'.
            ('idempotent_requests', NULL),
            ('workers', NULL), -- a status names adapters of all tenants
            ('gateway_load', NULL),
            ('usage_credits', NULL) -- one correction may concern all tenants
        ) AS t (name, own)
    LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', guarded.name);
        EXECUTE format(
            'CREATE POLICY tenant ON %I TO loraplex_app USING (%s = ''*''%s)',
            guarded.name, scope, coalesce(' OR ' || format(guarded.own, scope), ''));
    END LOOP;
END $$;
-- Of no tenant: catalog_generation, base_models, prices, usage_kept, schema_migrations, and what is known of a content
-- by its digest (adapter_proofs, adapter_faults, approved_templates, loose_contents). A tenant's request needs the
-- generations of `gateways`; what is in flight names other tenants' adapters and is shown to none.

GRANT SELECT, INSERT, UPDATE, DELETE ON
    tenants, api_keys, adapters, adapter_versions, version_proving, aliases, canary_targets, version_outcomes,
    adapter_faults, gateways, gateway_load, workers, loose_contents, base_models, prices, quotas, quota_holders,
    quota_leases, usage_totals, idempotent_requests
    TO loraplex_app;
GRANT SELECT, INSERT, UPDATE ON key_uses, usage_hourly, signing_keys TO loraplex_app;
GRANT SELECT, UPDATE ON catalog_generation TO loraplex_app;
-- Deleted with what they are about, and never changed.
GRANT SELECT, INSERT, DELETE ON
    alias_history, adapter_proofs, version_proofs, approved_templates, rejected_uploads
    TO loraplex_app;
-- Never changed nor deleted.
GRANT SELECT, INSERT ON usage, usage_credits TO loraplex_app;
-- Written only by functions.
GRANT SELECT ON audit_log, usage_kept, catalog_changes, schema_migrations TO loraplex_app;
GRANT USAGE ON SEQUENCE quota_calls TO loraplex_app;

-- The whole schema, for reading: each table with its keys, indexes, triggers, policies and rights,
-- then the functions. Databases are made of the numbered files beside this one. `make schema`
-- writes it, and a test compares it with what those files make.

CREATE DOMAIN alias_name AS text
	CONSTRAINT alias_name_form CHECK (((VALUE ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$'::text) AND (VALUE !~ '^[0-9]+$'::text)));
CREATE DOMAIN content_digest AS text
	CONSTRAINT content_digest_form CHECK ((VALUE ~ '^[0-9a-f]{64}$'::text));
CREATE DOMAIN entity_name AS text
	CONSTRAINT entity_name_form CHECK ((VALUE ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$'::text));
CREATE SEQUENCE quota_calls
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
GRANT USAGE ON SEQUENCE quota_calls TO loraplex_app;

CREATE TABLE adapter_faults (
    digest content_digest NOT NULL,
    worker text NOT NULL,
    code text NOT NULL,
    message text NOT NULL,
    since timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT adapter_faults_pkey PRIMARY KEY (digest, worker)
);
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE adapter_faults TO loraplex_app;

CREATE TABLE adapter_proofs (
    digest content_digest NOT NULL,
    base_digest content_digest NOT NULL,
    layout text NOT NULL,
    checksum content_digest NOT NULL,
    fingerprint jsonb NOT NULL,
    worker text NOT NULL,
    proved_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT adapter_proofs_pkey PRIMARY KEY (digest, base_digest, layout)
);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON adapter_proofs FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER note_delete AFTER DELETE ON adapter_proofs REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_proof();
CREATE TRIGGER note_insert AFTER INSERT ON adapter_proofs REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_proof();
CREATE TRIGGER note_update AFTER UPDATE ON adapter_proofs REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_proof();
GRANT SELECT,INSERT,DELETE ON TABLE adapter_proofs TO loraplex_app;

CREATE TABLE adapter_versions (
    tenant_id text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    state text NOT NULL,
    digest content_digest,
    base_name text,
    manifest jsonb,
    error jsonb,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    serving jsonb DEFAULT '{}'::jsonb NOT NULL,
    wanted_alias alias_name,
    uploaded_by text,
    ready_generation bigint,
    retired_at timestamp with time zone,
    retired_generation bigint,
    expires_at timestamp with time zone,
    signed_by text,
    signature bytea,
    CONSTRAINT adapter_versions_complete CHECK (
CASE
    WHEN (state = ANY (ARRAY['proving'::text, 'ready'::text])) THEN ((num_nonnulls(digest, base_name, manifest) = 3) AND (error IS NULL))
    WHEN (state = 'rejected'::text) THEN (error IS NOT NULL)
    WHEN (state = 'retired'::text) THEN ((retired_at IS NOT NULL) AND (retired_generation IS NOT NULL))
    ELSE true
END),
    CONSTRAINT adapter_versions_signature_check CHECK ((length(signature) = 64)),
    CONSTRAINT adapter_versions_signed CHECK ((num_nulls(signed_by, signature) = ANY (ARRAY[0, 2]))),
    CONSTRAINT adapter_versions_state_check CHECK ((state = ANY (ARRAY['uploading'::text, 'validating'::text, 'proving'::text, 'ready'::text, 'rejected'::text, 'retired'::text]))),
    CONSTRAINT adapter_versions_version_check CHECK ((version > 0)),
    CONSTRAINT adapter_versions_pkey PRIMARY KEY (tenant_id, name, version),
    CONSTRAINT adapter_versions_base_name_fkey FOREIGN KEY (base_name) REFERENCES base_models(name),
    CONSTRAINT adapter_versions_signed_by_fkey FOREIGN KEY (tenant_id, signed_by) REFERENCES signing_keys(tenant_id, id),
    CONSTRAINT adapter_versions_tenant_id_name_fkey FOREIGN KEY (tenant_id, name) REFERENCES adapters(tenant_id, name) ON DELETE CASCADE
);
CREATE INDEX adapter_versions_base ON adapter_versions USING btree (base_name);
CREATE UNIQUE INDEX adapter_versions_content ON adapter_versions USING btree (tenant_id, name, base_name, digest, md5((serving)::text)) WHERE ((state = ANY (ARRAY['proving'::text, 'ready'::text])) AND (expires_at IS NULL));
CREATE INDEX adapter_versions_digest ON adapter_versions USING btree (digest);
CREATE INDEX adapter_versions_ephemeral ON adapter_versions USING btree (expires_at) WHERE ((state = 'ready'::text) AND (expires_at IS NOT NULL));
CREATE INDEX adapter_versions_rejected ON adapter_versions USING btree (tenant_id, created_at) WHERE (state = 'rejected'::text);
CREATE INDEX adapter_versions_signed ON adapter_versions USING btree (tenant_id, signed_by) WHERE (signed_by IS NOT NULL);
CREATE INDEX adapter_versions_unsettled ON adapter_versions USING btree (state) WHERE (state = ANY (ARRAY['proving'::text, 'retired'::text]));
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON adapter_versions FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON adapter_versions FOR EACH ROW EXECUTE FUNCTION audit_change('version', 'name,version', 'manifest,serving,ready_generation,retired_generation');
CREATE TRIGGER immutable BEFORE UPDATE ON adapter_versions FOR EACH ROW EXECUTE FUNCTION keep_version_immutable();
CREATE TRIGGER note_delete AFTER DELETE ON adapter_versions REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter();
CREATE TRIGGER note_insert AFTER INSERT ON adapter_versions REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter();
CREATE TRIGGER note_update AFTER UPDATE ON adapter_versions REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter();
ALTER TABLE adapter_versions ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON adapter_versions TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE adapter_versions TO loraplex_app;

CREATE TABLE adapters (
    tenant_id text NOT NULL,
    name entity_name NOT NULL,
    last_version integer DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT adapters_pkey PRIMARY KEY (tenant_id, name),
    CONSTRAINT adapters_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants(id) ON DELETE CASCADE
);
CREATE INDEX adapters_name ON adapters USING btree (name);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON adapters FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER INSERT OR DELETE ON adapters FOR EACH ROW EXECUTE FUNCTION audit_change('adapter', 'name', 'last_version');
CREATE TRIGGER names_apart BEFORE INSERT OR UPDATE OF name ON adapters FOR EACH ROW EXECUTE FUNCTION keep_names_apart();
ALTER TABLE adapters ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON adapters TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE adapters TO loraplex_app;

CREATE TABLE alias_history (
    id bigint NOT NULL,
    tenant_id text NOT NULL,
    name text NOT NULL,
    alias text NOT NULL,
    version integer NOT NULL,
    previous integer,
    changed_by text,
    changed_at timestamp with time zone DEFAULT now() NOT NULL,
    canary jsonb,
    policy jsonb,
    reason text DEFAULT 'promote'::text NOT NULL,
    detail text,
    CONSTRAINT alias_history_reason_check CHECK ((reason = ANY (ARRAY['first'::text, 'upload'::text, 'promote'::text, 'canary'::text, 'rollback'::text, 'auto_rollback'::text, 'deleted'::text]))),
    CONSTRAINT alias_history_pkey PRIMARY KEY (id),
    CONSTRAINT alias_history_tenant_id_name_fkey FOREIGN KEY (tenant_id, name) REFERENCES adapters(tenant_id, name) ON DELETE CASCADE
);
ALTER TABLE alias_history ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME alias_history_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE INDEX alias_history_alias ON alias_history USING btree (tenant_id, name, alias, id);
CREATE TRIGGER audit AFTER INSERT ON alias_history FOR EACH ROW EXECUTE FUNCTION audit_change('alias', 'name,alias', 'id,changed_at');
ALTER TABLE alias_history ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON alias_history TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT,INSERT,DELETE ON TABLE alias_history TO loraplex_app;

CREATE TABLE aliases (
    tenant_id text NOT NULL,
    name text NOT NULL,
    alias alias_name NOT NULL,
    version integer NOT NULL,
    policy jsonb,
    pinned boolean DEFAULT false NOT NULL,
    change bigint,
    CONSTRAINT aliases_pkey PRIMARY KEY (tenant_id, name, alias),
    CONSTRAINT aliases_tenant_id_name_fkey FOREIGN KEY (tenant_id, name) REFERENCES adapters(tenant_id, name) ON DELETE CASCADE,
    CONSTRAINT aliases_tenant_id_name_version_fkey FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions(tenant_id, name, version) DEFERRABLE INITIALLY DEFERRED
);
CREATE INDEX aliases_version ON aliases USING btree (tenant_id, name, version);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON aliases FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit_pin AFTER UPDATE OF pinned ON aliases FOR EACH ROW EXECUTE FUNCTION audit_change('alias', 'name,alias', '');
CREATE TRIGGER note_delete AFTER DELETE ON aliases REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter();
CREATE TRIGGER note_insert AFTER INSERT ON aliases REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter();
CREATE TRIGGER note_update AFTER UPDATE ON aliases REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter();
ALTER TABLE aliases ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON aliases TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE aliases TO loraplex_app;

CREATE TABLE api_keys (
    id text NOT NULL,
    tenant_id text,
    name text DEFAULT ''::text NOT NULL,
    hash bytea NOT NULL,
    scopes text[] NOT NULL,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    not_before timestamp with time zone,
    models text[],
    cidrs cidr[],
    replaces text,
    family text,
    CONSTRAINT api_keys_cidrs_check CHECK ((cardinality(cidrs) > 0)),
    CONSTRAINT api_keys_hash_check CHECK ((length(hash) = 32)),
    CONSTRAINT api_keys_id_check CHECK ((id ~ '^[0-9A-Za-z]{12}$'::text)),
    CONSTRAINT api_keys_lifetime CHECK ((not_before < expires_at)),
    CONSTRAINT api_keys_models_check CHECK ((cardinality(models) > 0)),
    CONSTRAINT api_keys_name_check CHECK ((length(name) <= 128)),
    CONSTRAINT api_keys_scopes CHECK (
CASE
    WHEN (tenant_id IS NULL) THEN (scopes = '{admin}'::text[])
    ELSE (scopes <@ '{inference,adapters:write,usage:read}'::text[])
END),
    CONSTRAINT api_keys_scopes_check CHECK ((cardinality(scopes) > 0)),
    CONSTRAINT api_keys_pkey PRIMARY KEY (id),
    CONSTRAINT api_keys_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants(id) ON DELETE CASCADE
);
CREATE INDEX api_keys_tenant ON api_keys USING btree (tenant_id);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON api_keys FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON api_keys FOR EACH ROW EXECUTE FUNCTION audit_change('key', 'id', 'hash');
CREATE TRIGGER note_delete AFTER DELETE ON api_keys REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_tenant();
CREATE TRIGGER note_insert AFTER INSERT ON api_keys REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_tenant();
CREATE TRIGGER note_update AFTER UPDATE ON api_keys REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_tenant();
ALTER TABLE api_keys ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON api_keys TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE api_keys TO loraplex_app;

CREATE TABLE approved_templates (
    digest content_digest NOT NULL,
    approved_by text,
    approved_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT approved_templates_pkey PRIMARY KEY (digest)
);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON approved_templates FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON approved_templates FOR EACH ROW EXECUTE FUNCTION audit_change('template', 'digest', '');
GRANT SELECT,INSERT,DELETE ON TABLE approved_templates TO loraplex_app;

CREATE TABLE audit_log (
    seq bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    key_id text NOT NULL,
    tenant_id text,
    action text NOT NULL,
    object text NOT NULL,
    details jsonb NOT NULL,
    request_id text,
    prev bytea NOT NULL,
    hash bytea NOT NULL,
    address text,
    CONSTRAINT audit_log_hash_check CHECK ((length(hash) = 32)),
    CONSTRAINT audit_log_prev_check CHECK ((length(prev) = 32)),
    CONSTRAINT audit_log_pkey PRIMARY KEY (seq)
);
CREATE INDEX audit_log_object ON audit_log USING btree (object, seq);
CREATE INDEX audit_log_prunes ON audit_log USING btree (seq) WHERE (action = 'audit.prune'::text);
CREATE INDEX audit_log_tenant ON audit_log USING btree (tenant_id, seq);
CREATE TRIGGER chain BEFORE INSERT ON audit_log FOR EACH ROW EXECUTE FUNCTION audit_chain();
CREATE TRIGGER only_grows BEFORE DELETE OR UPDATE OR TRUNCATE ON audit_log FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change();
ALTER TABLE audit_log ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON audit_log TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT ON TABLE audit_log TO loraplex_app;

CREATE TABLE base_models (
    name entity_name NOT NULL,
    digest content_digest NOT NULL,
    shape jsonb NOT NULL,
    max_model_len integer NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    residency text DEFAULT 'auto'::text NOT NULL,
    source text DEFAULT ''::text NOT NULL,
    CONSTRAINT base_models_max_model_len_check CHECK ((max_model_len > 0)),
    CONSTRAINT base_models_residency_check CHECK ((residency = ANY (ARRAY['auto'::text, 'pinned'::text, 'unloaded'::text]))),
    CONSTRAINT base_models_pkey PRIMARY KEY (name)
);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON base_models FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON base_models FOR EACH ROW EXECUTE FUNCTION audit_change('model', 'name', 'shape');
CREATE TRIGGER names_apart BEFORE INSERT OR UPDATE OF name ON base_models FOR EACH ROW EXECUTE FUNCTION keep_names_apart();
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE base_models TO loraplex_app;

CREATE TABLE canary_targets (
    tenant_id text NOT NULL,
    name text NOT NULL,
    alias text NOT NULL,
    version integer NOT NULL,
    weight integer NOT NULL,
    CONSTRAINT canary_targets_weight_check CHECK (((weight >= 1) AND (weight <= 1000000))),
    CONSTRAINT canary_targets_pkey PRIMARY KEY (tenant_id, name, alias, version),
    CONSTRAINT canary_targets_tenant_id_name_alias_fkey FOREIGN KEY (tenant_id, name, alias) REFERENCES aliases(tenant_id, name, alias) ON DELETE CASCADE,
    CONSTRAINT canary_targets_tenant_id_name_version_fkey FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions(tenant_id, name, version) DEFERRABLE INITIALLY DEFERRED
);
CREATE INDEX canary_targets_version ON canary_targets USING btree (tenant_id, name, version);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON canary_targets FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER note_delete AFTER DELETE ON canary_targets REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter();
CREATE TRIGGER note_insert AFTER INSERT ON canary_targets REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter();
CREATE TRIGGER note_update AFTER UPDATE ON canary_targets REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_adapter();
ALTER TABLE canary_targets ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON canary_targets TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE canary_targets TO loraplex_app;

CREATE TABLE catalog_changes (
    tenant_id text NOT NULL,
    generation bigint NOT NULL,
    name text DEFAULT ''::text NOT NULL,
    CONSTRAINT catalog_changes_pkey PRIMARY KEY (tenant_id, name)
);
CREATE INDEX catalog_changes_generation ON catalog_changes USING btree (generation);
ALTER TABLE catalog_changes ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON catalog_changes TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT ON TABLE catalog_changes TO loraplex_app;

CREATE TABLE catalog_generation (
    one boolean DEFAULT true NOT NULL,
    generation bigint NOT NULL,
    CONSTRAINT catalog_generation_one_check CHECK (one),
    CONSTRAINT catalog_generation_pkey PRIMARY KEY (one)
);
GRANT SELECT,UPDATE ON TABLE catalog_generation TO loraplex_app;

CREATE TABLE gateway_load (
    gateway_id text NOT NULL,
    reported_at timestamp with time zone DEFAULT now() NOT NULL,
    load jsonb NOT NULL,
    CONSTRAINT gateway_load_pkey PRIMARY KEY (gateway_id),
    CONSTRAINT gateway_load_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES gateways(id) ON DELETE CASCADE
);
ALTER TABLE gateway_load ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON gateway_load TO loraplex_app USING ((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE gateway_load TO loraplex_app;

CREATE TABLE gateways (
    id text NOT NULL,
    generation bigint NOT NULL,
    in_flight jsonb DEFAULT '{}'::jsonb NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    seen_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT gateways_pkey PRIMARY KEY (id)
);
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE gateways TO loraplex_app;

CREATE TABLE idempotent_requests (
    id bytea NOT NULL,
    request bytea NOT NULL,
    nonce bytea NOT NULL,
    answer text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT idempotent_requests_id_check CHECK ((length(id) = 32)),
    CONSTRAINT idempotent_requests_nonce_check CHECK ((length(nonce) = 32)),
    CONSTRAINT idempotent_requests_request_check CHECK ((length(request) = 32)),
    CONSTRAINT idempotent_requests_pkey PRIMARY KEY (id)
);
CREATE INDEX idempotent_requests_age ON idempotent_requests USING btree (created_at);
ALTER TABLE idempotent_requests ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON idempotent_requests TO loraplex_app USING ((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE idempotent_requests TO loraplex_app;

CREATE TABLE key_uses (
    key_id text NOT NULL,
    last_used_at timestamp with time zone NOT NULL,
    CONSTRAINT key_uses_pkey PRIMARY KEY (key_id),
    CONSTRAINT key_uses_key_id_fkey FOREIGN KEY (key_id) REFERENCES api_keys(id) ON DELETE CASCADE
);
ALTER TABLE key_uses ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON key_uses TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (EXISTS ( SELECT
   FROM api_keys k
  WHERE (k.id = key_uses.key_id)))));
GRANT SELECT,INSERT,UPDATE ON TABLE key_uses TO loraplex_app;

CREATE TABLE loose_contents (
    digest content_digest NOT NULL,
    holder text NOT NULL,
    due timestamp with time zone NOT NULL,
    CONSTRAINT loose_contents_pkey PRIMARY KEY (digest, holder)
);
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE loose_contents TO loraplex_app;

CREATE TABLE prices (
    model entity_name NOT NULL,
    input bigint NOT NULL,
    cached_input bigint NOT NULL,
    output bigint NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT prices_check CHECK (((cached_input >= 0) AND (cached_input <= input))),
    CONSTRAINT prices_input_check CHECK (((input >= 0) AND (input <= '1000000000000'::bigint))),
    CONSTRAINT prices_output_check CHECK (((output >= 0) AND (output <= '1000000000000'::bigint))),
    CONSTRAINT prices_pkey PRIMARY KEY (model),
    CONSTRAINT prices_model_fkey FOREIGN KEY (model) REFERENCES base_models(name) ON DELETE CASCADE
);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON prices FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON prices FOR EACH ROW EXECUTE FUNCTION audit_change('price', 'model', 'updated_at');
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE prices TO loraplex_app;

CREATE TABLE quota_holders (
    gateway_id text NOT NULL,
    seen_at timestamp with time zone NOT NULL,
    until timestamp with time zone NOT NULL,
    exchange bigint NOT NULL,
    answer jsonb NOT NULL,
    CONSTRAINT quota_holders_pkey PRIMARY KEY (gateway_id)
);
CREATE TRIGGER keep_minutes BEFORE DELETE ON quota_holders FOR EACH ROW EXECUTE FUNCTION keep_minutes();
ALTER TABLE quota_holders ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON quota_holders TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR false));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE quota_holders TO loraplex_app;

CREATE TABLE quota_leases (
    subject text NOT NULL,
    kind text NOT NULL,
    start timestamp with time zone NOT NULL,
    gateway_id text NOT NULL,
    granted bigint NOT NULL,
    answered bigint DEFAULT 0 NOT NULL,
    CONSTRAINT quota_leases_pkey PRIMARY KEY (subject, kind, start, gateway_id),
    CONSTRAINT quota_leases_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES quota_holders(gateway_id) ON DELETE CASCADE
);
CREATE INDEX quota_leases_gateway ON quota_leases USING btree (gateway_id);
ALTER TABLE quota_leases ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON quota_leases TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (subject = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting)) OR (EXISTS ( SELECT
   FROM api_keys k
  WHERE (k.id = quota_leases.subject)))));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE quota_leases TO loraplex_app;

CREATE TABLE quotas (
    subject text NOT NULL,
    tenant_id text NOT NULL,
    key_id text,
    requests_per_minute bigint,
    tokens_per_minute bigint,
    concurrent_requests bigint,
    tokens_per_day bigint,
    tokens_per_month bigint,
    spend_per_day bigint,
    spend_per_month bigint,
    adapters bigint,
    adapter_bytes bigint,
    cached_weight smallint DEFAULT 100 NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    weight smallint DEFAULT 1 NOT NULL,
    class text DEFAULT 'standard'::text NOT NULL,
    CONSTRAINT quotas_adapter_bytes_check CHECK ((adapter_bytes >= 0)),
    CONSTRAINT quotas_adapters_check CHECK ((adapters >= 0)),
    CONSTRAINT quotas_cached_weight_check CHECK (((cached_weight >= 0) AND (cached_weight <= 100))),
    CONSTRAINT quotas_check CHECK ((subject = COALESCE(key_id, tenant_id))),
    CONSTRAINT quotas_check1 CHECK (((key_id IS NULL) OR ((num_nonnulls(adapters, adapter_bytes) = 0) AND (cached_weight = 100)))),
    CONSTRAINT quotas_class_check CHECK ((class = ANY (ARRAY['interactive'::text, 'standard'::text, 'batch'::text]))),
    CONSTRAINT quotas_concurrent_requests_check CHECK ((concurrent_requests >= 0)),
    CONSTRAINT quotas_requests_per_minute_check CHECK ((requests_per_minute >= 0)),
    CONSTRAINT quotas_service CHECK (((key_id IS NULL) OR ((weight = 1) AND (class = 'standard'::text)))),
    CONSTRAINT quotas_spend_per_day_check CHECK ((spend_per_day >= 0)),
    CONSTRAINT quotas_spend_per_month_check CHECK ((spend_per_month >= 0)),
    CONSTRAINT quotas_tokens_per_day_check CHECK ((tokens_per_day >= 0)),
    CONSTRAINT quotas_tokens_per_minute_check CHECK ((tokens_per_minute >= 0)),
    CONSTRAINT quotas_tokens_per_month_check CHECK ((tokens_per_month >= 0)),
    CONSTRAINT quotas_weight_check CHECK (((weight >= 1) AND (weight <= 1000))),
    CONSTRAINT quotas_pkey PRIMARY KEY (subject),
    CONSTRAINT quotas_key_id_fkey FOREIGN KEY (key_id) REFERENCES api_keys(id) ON DELETE CASCADE,
    CONSTRAINT quotas_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants(id) ON DELETE CASCADE
);
CREATE INDEX quotas_key ON quotas USING btree (key_id);
CREATE INDEX quotas_tenant ON quotas USING btree (tenant_id);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON quotas FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON quotas FOR EACH ROW EXECUTE FUNCTION audit_change('quota', 'subject', 'updated_at');
CREATE TRIGGER note_delete AFTER DELETE ON quotas REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_tenant();
CREATE TRIGGER note_insert AFTER INSERT ON quotas REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_tenant();
CREATE TRIGGER note_update AFTER UPDATE ON quotas REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_change_of_tenant();
ALTER TABLE quotas ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON quotas TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE quotas TO loraplex_app;

CREATE TABLE rejected_uploads (
    id bigint NOT NULL,
    tenant_id text NOT NULL,
    name entity_name NOT NULL,
    error jsonb NOT NULL,
    uploaded_by text,
    rejected_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT rejected_uploads_pkey PRIMARY KEY (id),
    CONSTRAINT rejected_uploads_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants(id) ON DELETE CASCADE
);
ALTER TABLE rejected_uploads ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME rejected_uploads_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE INDEX rejected_uploads_tenant ON rejected_uploads USING btree (tenant_id, id);
ALTER TABLE rejected_uploads ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON rejected_uploads TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT,INSERT,DELETE ON TABLE rejected_uploads TO loraplex_app;

CREATE TABLE schema_migrations (
    number integer NOT NULL,
    name text NOT NULL,
    sha256 text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT schema_migrations_pkey PRIMARY KEY (number)
);
GRANT SELECT ON TABLE schema_migrations TO loraplex_app;

CREATE TABLE signing_keys (
    id text NOT NULL,
    tenant_id text NOT NULL,
    name entity_name NOT NULL,
    public_key bytea NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    revoked_at timestamp with time zone,
    CONSTRAINT signing_keys_id_check CHECK ((id ~ '^sig_[0-9A-Za-z]{12}$'::text)),
    CONSTRAINT signing_keys_public_key_check CHECK ((length(public_key) = 32)),
    CONSTRAINT signing_keys_pkey PRIMARY KEY (id),
    CONSTRAINT signing_keys_tenant_id_id_key UNIQUE (tenant_id, id),
    CONSTRAINT signing_keys_tenant_id_public_key_key UNIQUE (tenant_id, public_key),
    CONSTRAINT signing_keys_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants(id) ON DELETE CASCADE
);
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON signing_keys FOR EACH ROW EXECUTE FUNCTION audit_change('signing_key', 'id', '');
ALTER TABLE signing_keys ENABLE ROW LEVEL SECURITY;
CREATE POLICY tenant ON signing_keys TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
GRANT SELECT,INSERT,UPDATE ON TABLE signing_keys TO loraplex_app;

CREATE TABLE tenants (
    id text NOT NULL,
    name entity_name NOT NULL,
    sharing_group entity_name,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    pin_bytes bigint DEFAULT 0 NOT NULL,
    require_signature boolean DEFAULT false NOT NULL,
    CONSTRAINT tenants_id_check CHECK ((id ~ '^ten_[0-9A-Za-z]{12}$'::text)),
    CONSTRAINT tenants_name_check CHECK (((name)::text !~ '^ten_'::text)),
    CONSTRAINT tenants_pin_bytes_check CHECK ((pin_bytes >= 0)),
    CONSTRAINT tenants_name_key UNIQUE (name),
    CONSTRAINT tenants_pkey PRIMARY KEY (id)
);
CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON tenants FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON tenants FOR EACH ROW EXECUTE FUNCTION audit_change('tenant', 'id', '');
CREATE TRIGGER note_delete AFTER DELETE ON tenants REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_tenant_change();
CREATE TRIGGER note_insert AFTER INSERT ON tenants REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_tenant_change();
CREATE TRIGGER note_update AFTER UPDATE ON tenants REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION note_tenant_change();
CREATE POLICY tenant ON tenants TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
ALTER TABLE tenants ENABLE ROW LEVEL SECURITY;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE tenants TO loraplex_app;

CREATE TABLE usage (
    day date NOT NULL,
    request_id text NOT NULL,
    admitted_at timestamp with time zone NOT NULL,
    tenant_id text NOT NULL,
    key_id text NOT NULL,
    model text NOT NULL,
    adapter text,
    adapter_version integer,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    ttft_ms double precision,
    duration_ms double precision NOT NULL,
    finish_reasons text[] NOT NULL,
    worker text NOT NULL,
    trace_id text,
    status text NOT NULL,
    gateway text DEFAULT ''::text NOT NULL,
    metered_tokens bigint DEFAULT 0 NOT NULL,
    cost bigint DEFAULT 0 NOT NULL,
    input_cost bigint DEFAULT 0 NOT NULL,
    cached_input_cost bigint DEFAULT 0 NOT NULL,
    output_cost bigint DEFAULT 0 NOT NULL,
    CONSTRAINT usage_check CHECK (((cached_tokens >= 0) AND (cached_tokens <= prompt_tokens))),
    CONSTRAINT usage_completion_tokens_check CHECK ((completion_tokens >= 0)),
    CONSTRAINT usage_prompt_tokens_check CHECK ((prompt_tokens >= 0)),
    CONSTRAINT usage_status_check CHECK ((status = ANY (ARRAY['completed'::text, 'failed'::text, 'cancelled'::text]))),
    CONSTRAINT usage_pkey PRIMARY KEY (day, request_id)
)
PARTITION BY RANGE (day);
CREATE INDEX usage_admitted ON ONLY usage USING btree (admitted_at);
CREATE INDEX usage_tenant ON ONLY usage USING btree (tenant_id, admitted_at);
CREATE POLICY tenant ON usage TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
ALTER TABLE usage ENABLE ROW LEVEL SECURITY;
GRANT SELECT,INSERT ON TABLE usage TO loraplex_app;

CREATE TABLE usage_credits (
    id entity_name NOT NULL,
    model text NOT NULL,
    tenant_id text,
    since timestamp with time zone NOT NULL,
    until timestamp with time zone NOT NULL,
    input bigint NOT NULL,
    cached_input bigint NOT NULL,
    output bigint NOT NULL,
    reason text NOT NULL,
    requests bigint NOT NULL,
    cost_before numeric NOT NULL,
    cost_after numeric NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT usage_credits_check CHECK ((since < until)),
    CONSTRAINT usage_credits_reason_check CHECK (((length(reason) >= 1) AND (length(reason) <= 1000))),
    CONSTRAINT usage_credits_pkey PRIMARY KEY (id)
);
CREATE TRIGGER audit AFTER INSERT ON usage_credits FOR EACH ROW EXECUTE FUNCTION audit_change('credit', 'id', '');
CREATE POLICY tenant ON usage_credits TO loraplex_app USING ((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text));
ALTER TABLE usage_credits ENABLE ROW LEVEL SECURITY;
GRANT SELECT,INSERT ON TABLE usage_credits TO loraplex_app;

CREATE TABLE usage_hourly (
    hour timestamp with time zone NOT NULL,
    tenant_id text NOT NULL,
    model text NOT NULL,
    adapter text NOT NULL,
    key_id text NOT NULL,
    requests bigint NOT NULL,
    prompt_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    adapter_version integer DEFAULT 0 NOT NULL,
    metered_tokens bigint DEFAULT 0 NOT NULL,
    cost numeric DEFAULT 0 NOT NULL,
    input_cost numeric DEFAULT 0 NOT NULL,
    cached_input_cost numeric DEFAULT 0 NOT NULL,
    output_cost numeric DEFAULT 0 NOT NULL,
    credited numeric DEFAULT 0 NOT NULL,
    CONSTRAINT usage_hourly_pkey PRIMARY KEY (hour, tenant_id, model, adapter, adapter_version, key_id)
);
CREATE INDEX usage_hourly_tenant ON usage_hourly USING btree (tenant_id, hour);
CREATE POLICY tenant ON usage_hourly TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
ALTER TABLE usage_hourly ENABLE ROW LEVEL SECURITY;
GRANT SELECT,INSERT,UPDATE ON TABLE usage_hourly TO loraplex_app;

CREATE TABLE usage_kept (
    one boolean DEFAULT true NOT NULL,
    first_day date NOT NULL,
    CONSTRAINT usage_kept_one_check CHECK (one),
    CONSTRAINT usage_kept_pkey PRIMARY KEY (one)
);
GRANT SELECT ON TABLE usage_kept TO loraplex_app;

CREATE TABLE usage_totals (
    subject text NOT NULL,
    span text NOT NULL,
    start date NOT NULL,
    metered_tokens bigint NOT NULL,
    cost numeric NOT NULL,
    CONSTRAINT usage_totals_span_check CHECK ((span = ANY (ARRAY['day'::text, 'month'::text]))),
    CONSTRAINT usage_totals_pkey PRIMARY KEY (subject, span, start)
);
CREATE INDEX usage_totals_start ON usage_totals USING btree (start);
CREATE POLICY tenant ON usage_totals TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (subject = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting)) OR (EXISTS ( SELECT
   FROM api_keys k
  WHERE (k.id = usage_totals.subject)))));
ALTER TABLE usage_totals ENABLE ROW LEVEL SECURITY;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE usage_totals TO loraplex_app;

CREATE TABLE version_outcomes (
    change bigint NOT NULL,
    version integer NOT NULL,
    bucket timestamp with time zone NOT NULL,
    gateway_id text NOT NULL,
    requests integer NOT NULL,
    errors integer NOT NULL,
    ttft integer[] NOT NULL,
    CONSTRAINT version_outcomes_pkey PRIMARY KEY (change, version, bucket, gateway_id),
    CONSTRAINT version_outcomes_change_fkey FOREIGN KEY (change) REFERENCES alias_history(id) ON DELETE CASCADE
);
CREATE INDEX version_outcomes_bucket ON version_outcomes USING btree (bucket);
CREATE POLICY tenant ON version_outcomes TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (EXISTS ( SELECT
   FROM alias_history h
  WHERE (h.id = version_outcomes.change)))));
ALTER TABLE version_outcomes ENABLE ROW LEVEL SECURITY;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE version_outcomes TO loraplex_app;

CREATE TABLE version_proofs (
    tenant_id text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    base_digest content_digest NOT NULL,
    layout text NOT NULL,
    checksum content_digest NOT NULL,
    fingerprint jsonb NOT NULL,
    worker text NOT NULL,
    proved_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT version_proofs_pkey PRIMARY KEY (tenant_id, name, version, base_digest, layout),
    CONSTRAINT version_proofs_tenant_id_name_version_fkey FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions(tenant_id, name, version) ON DELETE CASCADE
);
CREATE POLICY tenant ON version_proofs TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
ALTER TABLE version_proofs ENABLE ROW LEVEL SECURITY;
GRANT SELECT,INSERT,DELETE ON TABLE version_proofs TO loraplex_app;

CREATE TABLE version_proving (
    tenant_id text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    claimed_by text,
    claimed_until timestamp with time zone,
    attempts integer DEFAULT 0 NOT NULL,
    detail text,
    CONSTRAINT version_proving_pkey PRIMARY KEY (tenant_id, name, version),
    CONSTRAINT version_proving_tenant_id_name_version_fkey FOREIGN KEY (tenant_id, name, version) REFERENCES adapter_versions(tenant_id, name, version) ON DELETE CASCADE
);
CREATE POLICY tenant ON version_proving TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));
ALTER TABLE version_proving ENABLE ROW LEVEL SECURITY;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE version_proving TO loraplex_app;

CREATE TABLE workers (
    id text NOT NULL,
    address text NOT NULL,
    registered_at timestamp with time zone DEFAULT now() NOT NULL,
    leased_until timestamp with time zone,
    draining boolean,
    status jsonb,
    reported_at timestamp with time zone,
    reported_by text,
    failure text DEFAULT ''::text NOT NULL,
    CONSTRAINT workers_address_check CHECK (((length(address) >= 1) AND (length(address) <= 512))),
    CONSTRAINT workers_id_check CHECK (((length(id) >= 1) AND (length(id) <= 256))),
    CONSTRAINT workers_reachable CHECK (((leased_until IS NULL) OR (address ~ '^unix:/.'::text) OR ((address ~ '^tcp://.+:[0-9]{1,5}$'::text) AND (("substring"(address, '[0-9]+$'::text))::numeric < (65536)::numeric)))),
    CONSTRAINT workers_pkey PRIMARY KEY (id)
);
CREATE TRIGGER audit AFTER UPDATE OF draining ON workers FOR EACH ROW EXECUTE FUNCTION audit_change('worker', 'id', 'leased_until,status,reported_at,reported_by');
CREATE TRIGGER bump_delete AFTER DELETE ON workers FOR EACH ROW WHEN (((old.leased_until IS NOT NULL) OR (old.draining IS NOT NULL))) EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER bump_insert AFTER INSERT ON workers FOR EACH ROW WHEN ((new.leased_until IS NOT NULL)) EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER bump_update AFTER UPDATE ON workers FOR EACH ROW WHEN ((((old.address IS DISTINCT FROM new.address) OR ((old.leased_until IS NULL) IS DISTINCT FROM (new.leased_until IS NULL))) OR (old.draining IS DISTINCT FROM new.draining))) EXECUTE FUNCTION bump_catalog();
CREATE POLICY tenant ON workers TO loraplex_app USING ((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text));
ALTER TABLE workers ENABLE ROW LEVEL SECURITY;
GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE workers TO loraplex_app;

CREATE FUNCTION approve_template(of_digest text, by_key text) RETURNS void
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION audit_chain() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION audit_change() RETURNS trigger
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
REVOKE ALL ON FUNCTION audit_change() FROM PUBLIC;
GRANT ALL ON FUNCTION audit_change() TO loraplex_app;

CREATE FUNCTION audit_field(value text) RETURNS bytea
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT CASE WHEN value IS NULL THEN '\x00'::bytea
                ELSE '\x01'::bytea || int4send(octet_length(convert_to(value, 'UTF8'))) || convert_to(value, 'UTF8') END
$$;

CREATE FUNCTION audit_prune(through bigint, last_hash text, seal text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
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

REVOKE ALL ON FUNCTION audit_prune(through bigint, last_hash text, seal text) FROM PUBLIC;
GRANT ALL ON FUNCTION audit_prune(through bigint, last_hash text, seal text) TO loraplex_app;

CREATE FUNCTION bump_catalog() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
DECLARE
    now_at bigint;
BEGIN
    UPDATE catalog_generation SET generation = generation + 1 RETURNING generation INTO now_at;
    PERFORM pg_notify('loraplex_catalog', now_at::text);
    RETURN NULL;
END $$;

REVOKE ALL ON FUNCTION content_is_free(of_digest text) FROM PUBLIC;
GRANT ALL ON FUNCTION content_is_free(of_digest text) TO loraplex_app;

CREATE FUNCTION content_is_free(of_digest text) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
    SELECT NOT EXISTS (SELECT FROM loose_contents WHERE digest = of_digest AND due > now())
        AND NOT EXISTS (SELECT FROM adapter_versions WHERE digest = of_digest AND state <> 'rejected')
$$;

CREATE FUNCTION keep_minutes() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION keep_names_apart() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF TG_TABLE_NAME = 'adapters' AND EXISTS (SELECT FROM base_models WHERE name = NEW.name) THEN
        RAISE EXCEPTION 'a base model is named %', NEW.name USING ERRCODE = 'unique_violation';
    END IF;
    IF TG_TABLE_NAME = 'base_models' AND EXISTS (SELECT FROM adapters WHERE name = NEW.name) THEN
        RAISE EXCEPTION 'an adapter is named %', NEW.name USING ERRCODE = 'unique_violation';
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION keep_version_immutable() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
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


SET default_tablespace = '';

SET default_table_access_method = heap;

REVOKE ALL ON FUNCTION key_by_id(of_id text) FROM PUBLIC;
GRANT ALL ON FUNCTION key_by_id(of_id text) TO loraplex_app;

CREATE FUNCTION key_by_id(of_id text) RETURNS SETOF api_keys
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
    SELECT * FROM api_keys WHERE id = of_id
$$;

CREATE FUNCTION note_change_of_adapter() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, name, generation)
    SELECT DISTINCT changed.tenant_id, changed.name, generation FROM changed, catalog_generation ORDER BY 1, 2
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION note_change_of_adapter() FROM PUBLIC;

CREATE FUNCTION note_change_of_tenant() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT changed.tenant_id, generation FROM changed, catalog_generation
    WHERE changed.tenant_id IS NOT NULL -- an admin key is nobody's, and always loaded
    ORDER BY 1
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION note_change_of_tenant() FROM PUBLIC;

CREATE FUNCTION note_proof() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, name, generation)
    SELECT DISTINCT v.tenant_id, v.name, generation
    FROM changed JOIN adapter_versions v USING (digest), catalog_generation ORDER BY 1, 2
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION note_proof() FROM PUBLIC;

CREATE FUNCTION note_tenant_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT changed.id, generation FROM changed, catalog_generation ORDER BY 1
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;
REVOKE ALL ON FUNCTION note_tenant_change() FROM PUBLIC;

CREATE FUNCTION pinned_bytes(of_tenant text) RETURNS bigint
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce(sum(bytes), 0)::bigint FROM (
        SELECT DISTINCT v.name, v.version, (v.manifest ->> 'file_bytes')::bigint AS bytes
        FROM aliases a
        LEFT JOIN canary_targets t USING (tenant_id, name, alias)
        JOIN adapter_versions v ON (v.tenant_id, v.name) = (a.tenant_id, a.name) AND v.version IN (a.version, t.version)
        WHERE a.tenant_id = of_tenant AND a.pinned
    ) pinned
$$;

CREATE FUNCTION point_alias(of_tenant text, of_name text, of_alias text, to_version integer, to_canary jsonb, with_policy jsonb, by_key text, why text, why_detail text, if_change bigint) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION quota_counts(kind text, until timestamp with time zone) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    SELECT split_part(kind, '_per_', 2) = 'minute'
        OR until > now() - CASE WHEN split_part(kind, '_per_', 2) IN ('day', 'month') THEN interval '1 hour'
                                ELSE interval '0' END
$$;

CREATE FUNCTION quota_exchange(of_gateway text, number bigint, lifetime interval, asks jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION quota_upkeep() RETURNS void
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION refuse_audit_change() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('loraplex.prunes_audit', true) = 'yes' THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'the audit log only grows' USING ERRCODE = 'integrity_constraint_violation';
END $$;

CREATE FUNCTION template_digest(serving jsonb) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT encode(sha256(convert_to(serving ->> 'chat_template', 'UTF8')), 'hex')
$$;

CREATE FUNCTION usage_drop_before(of_day date) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
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

REVOKE ALL ON FUNCTION usage_drop_before(of_day date) FROM PUBLIC;
GRANT ALL ON FUNCTION usage_drop_before(of_day date) TO loraplex_app;

CREATE FUNCTION usage_make_partition(of_day date) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
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

REVOKE ALL ON FUNCTION usage_make_partition(of_day date) FROM PUBLIC;
GRANT ALL ON FUNCTION usage_make_partition(of_day date) TO loraplex_app;

CREATE FUNCTION usage_reprice(of_model text, of_tenant text, since timestamp with time zone, until timestamp with time zone, price_input bigint, price_cached_input bigint, price_output bigint, OUT requests bigint, OUT cost_before numeric, OUT cost_after numeric, OUT raised timestamp with time zone) RETURNS record
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION version_proved(of_tenant text, of_name text, of_version integer, in_layout text, with_checksum text, with_fingerprint jsonb, by_worker text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION version_ready(of_tenant text, of_name text, of_version integer) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION version_rejected(of_tenant text, of_name text, of_version integer, because jsonb) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION version_state(state text, serving jsonb) RETURNS text
    LANGUAGE sql STABLE
    AS $$
    SELECT CASE WHEN state = 'ready' AND serving ->> 'chat_template' IS NOT NULL
                    AND NOT EXISTS (SELECT FROM approved_templates WHERE digest = template_digest(serving))
                THEN 'awaiting_approval' ELSE state END
$$;

CREATE FUNCTION version_takes_aliases(made adapter_versions) RETURNS void
    LANGUAGE plpgsql
    AS $$
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

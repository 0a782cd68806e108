--
-- PostgreSQL database dump
--

\restrict HDdIjTCeHcJV6KkH1yOFROnEwAHsEbMF1XR5Phj1MEtZHvCDH4NSXTKCxWhq2lV

-- Dumped from database version 18.6
-- Dumped by pg_dump version 18.6

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET transaction_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

--
-- Name: alias_name; Type: DOMAIN; Schema: public; Owner: -
--

CREATE DOMAIN public.alias_name AS text
	CONSTRAINT alias_name_form CHECK (((VALUE ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$'::text) AND (VALUE !~ '^[0-9]+$'::text)));


--
-- Name: content_digest; Type: DOMAIN; Schema: public; Owner: -
--

CREATE DOMAIN public.content_digest AS text
	CONSTRAINT content_digest_form CHECK ((VALUE ~ '^[0-9a-f]{64}$'::text));


--
-- Name: entity_name; Type: DOMAIN; Schema: public; Owner: -
--

CREATE DOMAIN public.entity_name AS text
	CONSTRAINT entity_name_form CHECK ((VALUE ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$'::text));


--
-- Name: audit_chain(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.audit_chain() RETURNS trigger
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
    NEW.hash := sha256(
        NEW.prev || audit_field(NEW.seq::text)
        || audit_field((extract(epoch FROM NEW.at) * 1000000)::bigint::text)
        || audit_field(NEW.key_id) || audit_field(NEW.tenant_id) || audit_field(NEW.action) || audit_field(NEW.object)
        || audit_field(NEW.details::text) || audit_field(NEW.request_id));
    RETURN NEW;
END $$;


--
-- Name: audit_change(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.audit_change() RETURNS trigger
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


--
-- Name: audit_field(text); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.audit_field(value text) RETURNS bytea
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT CASE WHEN value IS NULL THEN '\x00'::bytea
                ELSE '\x01'::bytea || int4send(octet_length(convert_to(value, 'UTF8'))) || convert_to(value, 'UTF8') END
$$;


--
-- Name: bump_catalog(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.bump_catalog() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
DECLARE
    now_at bigint;
BEGIN
    UPDATE catalog_generation SET generation = generation + 1 RETURNING generation INTO now_at;
    PERFORM pg_notify('loraplex_catalog', now_at::text);
    RETURN NULL;
END $$;


--
-- Name: content_is_free(text); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.content_is_free(of_digest text) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
    SELECT NOT EXISTS (SELECT FROM loose_contents WHERE digest = of_digest AND due > now())
        AND NOT EXISTS (SELECT FROM adapter_versions WHERE digest = of_digest AND state <> 'rejected')
$$;


--
-- Name: keep_names_apart(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.keep_names_apart() RETURNS trigger
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


--
-- Name: keep_version_immutable(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.keep_version_immutable() RETURNS trigger
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

--
-- Name: api_keys; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.api_keys (
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
    CONSTRAINT api_keys_scopes_check CHECK ((cardinality(scopes) > 0))
);


--
-- Name: key_by_id(text); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.key_by_id(of_id text) RETURNS SETOF public.api_keys
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
    SELECT * FROM api_keys WHERE id = of_id
$$;


--
-- Name: note_change_of_adapter(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.note_change_of_adapter() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, name, generation)
    SELECT DISTINCT changed.tenant_id, changed.name, generation FROM changed, catalog_generation ORDER BY 1, 2
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;


--
-- Name: note_change_of_tenant(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.note_change_of_tenant() RETURNS trigger
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


--
-- Name: note_proof(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.note_proof() RETURNS trigger
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


--
-- Name: note_tenant_change(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.note_tenant_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO catalog_changes (tenant_id, generation)
    SELECT DISTINCT changed.id, generation FROM changed, catalog_generation ORDER BY 1
    ON CONFLICT (tenant_id, name) DO UPDATE SET generation = excluded.generation;
    RETURN NULL;
END $$;


--
-- Name: pinned_bytes(text); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.pinned_bytes(of_tenant text) RETURNS bigint
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


--
-- Name: point_alias(text, text, text, integer, jsonb, jsonb, text, text, text, bigint); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.point_alias(of_tenant text, of_name text, of_alias text, to_version integer, to_canary jsonb, with_policy jsonb, by_key text, why text, why_detail text, if_change bigint) RETURNS bigint
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


--
-- Name: quota_counts(text, timestamp with time zone); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.quota_counts(kind text, until timestamp with time zone) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    SELECT until > now() - CASE WHEN split_part(kind, '_per_', 2) IN ('day', 'month') THEN interval '1 hour'
                                ELSE interval '0' END
$$;


--
-- Name: quota_exchange(text, bigint, interval, jsonb); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.quota_exchange(of_gateway text, number bigint, lifetime interval, asks jsonb) RETURNS jsonb
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


--
-- Name: quota_upkeep(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.quota_upkeep() RETURNS void
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


--
-- Name: refuse_audit_change(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.refuse_audit_change() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION 'the audit log only grows' USING ERRCODE = 'integrity_constraint_violation';
END $$;


--
-- Name: usage_drop_before(date); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.usage_drop_before(of_day date) RETURNS integer
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


--
-- Name: usage_make_partition(date); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.usage_make_partition(of_day date) RETURNS void
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


--
-- Name: version_proved(text, text, integer, text, text, jsonb, text); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.version_proved(of_tenant text, of_name text, of_version integer, in_layout text, with_checksum text, with_fingerprint jsonb, by_worker text) RETURNS boolean
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
    PERFORM version_ready(v.tenant_id, v.name, v.version)
        FROM adapter_versions v JOIN base_models b ON b.name = v.base_name
        WHERE (v.digest, b.digest, v.state) = (content, base, 'proving')
        ORDER BY v.tenant_id, v.name, v.version;
    RETURN true;
END $$;


--
-- Name: version_ready(text, text, integer); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.version_ready(of_tenant text, of_name text, of_version integer) RETURNS boolean
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


--
-- Name: version_rejected(text, text, integer, jsonb); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.version_rejected(of_tenant text, of_name text, of_version integer, because jsonb) RETURNS boolean
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


--
-- Name: adapter_faults; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.adapter_faults (
    digest public.content_digest NOT NULL,
    worker text NOT NULL,
    code text NOT NULL,
    message text NOT NULL,
    since timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: adapter_proofs; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.adapter_proofs (
    digest public.content_digest NOT NULL,
    base_digest public.content_digest NOT NULL,
    layout text NOT NULL,
    checksum public.content_digest NOT NULL,
    fingerprint jsonb NOT NULL,
    worker text NOT NULL,
    proved_at timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: adapter_versions; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.adapter_versions (
    tenant_id text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    state text NOT NULL,
    digest public.content_digest,
    base_name text,
    manifest jsonb,
    error jsonb,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    serving jsonb DEFAULT '{}'::jsonb NOT NULL,
    wanted_alias public.alias_name,
    uploaded_by text,
    ready_generation bigint,
    retired_at timestamp with time zone,
    retired_generation bigint,
    CONSTRAINT adapter_versions_complete CHECK (
CASE
    WHEN (state = ANY (ARRAY['proving'::text, 'ready'::text])) THEN ((num_nonnulls(digest, base_name, manifest) = 3) AND (error IS NULL))
    WHEN (state = 'rejected'::text) THEN (error IS NOT NULL)
    WHEN (state = 'retired'::text) THEN ((retired_at IS NOT NULL) AND (retired_generation IS NOT NULL))
    ELSE true
END),
    CONSTRAINT adapter_versions_state_check CHECK ((state = ANY (ARRAY['uploading'::text, 'validating'::text, 'proving'::text, 'ready'::text, 'rejected'::text, 'retired'::text]))),
    CONSTRAINT adapter_versions_version_check CHECK ((version > 0))
);


--
-- Name: adapters; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.adapters (
    tenant_id text NOT NULL,
    name public.entity_name NOT NULL,
    last_version integer DEFAULT 0 NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: alias_history; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.alias_history (
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
    CONSTRAINT alias_history_reason_check CHECK ((reason = ANY (ARRAY['first'::text, 'upload'::text, 'promote'::text, 'canary'::text, 'rollback'::text, 'auto_rollback'::text, 'deleted'::text])))
);


--
-- Name: alias_history_id_seq; Type: SEQUENCE; Schema: public; Owner: -
--

ALTER TABLE public.alias_history ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.alias_history_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);


--
-- Name: aliases; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.aliases (
    tenant_id text NOT NULL,
    name text NOT NULL,
    alias public.alias_name NOT NULL,
    version integer NOT NULL,
    policy jsonb,
    pinned boolean DEFAULT false NOT NULL,
    change bigint
);


--
-- Name: approved_templates; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.approved_templates (
    digest public.content_digest NOT NULL,
    approved_by text,
    approved_at timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: audit_log; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.audit_log (
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
    CONSTRAINT audit_log_hash_check CHECK ((length(hash) = 32)),
    CONSTRAINT audit_log_prev_check CHECK ((length(prev) = 32))
);


--
-- Name: base_models; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.base_models (
    name public.entity_name NOT NULL,
    digest public.content_digest NOT NULL,
    shape jsonb NOT NULL,
    max_model_len integer NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    residency text DEFAULT 'auto'::text NOT NULL,
    CONSTRAINT base_models_max_model_len_check CHECK ((max_model_len > 0)),
    CONSTRAINT base_models_residency_check CHECK ((residency = ANY (ARRAY['auto'::text, 'pinned'::text, 'unloaded'::text])))
);


--
-- Name: canary_targets; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.canary_targets (
    tenant_id text NOT NULL,
    name text NOT NULL,
    alias text NOT NULL,
    version integer NOT NULL,
    weight integer NOT NULL,
    CONSTRAINT canary_targets_weight_check CHECK (((weight >= 1) AND (weight <= 1000000)))
);


--
-- Name: catalog_changes; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.catalog_changes (
    tenant_id text NOT NULL,
    generation bigint NOT NULL,
    name text DEFAULT ''::text NOT NULL
);


--
-- Name: catalog_generation; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.catalog_generation (
    one boolean DEFAULT true NOT NULL,
    generation bigint NOT NULL,
    CONSTRAINT catalog_generation_one_check CHECK (one)
);


--
-- Name: gateways; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.gateways (
    id text NOT NULL,
    generation bigint NOT NULL,
    in_flight jsonb DEFAULT '{}'::jsonb NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    seen_at timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: idempotent_requests; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.idempotent_requests (
    id bytea NOT NULL,
    request bytea NOT NULL,
    nonce bytea NOT NULL,
    answer text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT idempotent_requests_id_check CHECK ((length(id) = 32)),
    CONSTRAINT idempotent_requests_nonce_check CHECK ((length(nonce) = 32)),
    CONSTRAINT idempotent_requests_request_check CHECK ((length(request) = 32))
);


--
-- Name: key_uses; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.key_uses (
    key_id text NOT NULL,
    last_used_at timestamp with time zone NOT NULL
);


--
-- Name: loose_contents; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.loose_contents (
    digest public.content_digest NOT NULL,
    holder text NOT NULL,
    due timestamp with time zone NOT NULL
);


--
-- Name: prices; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.prices (
    model public.entity_name NOT NULL,
    input bigint NOT NULL,
    cached_input bigint NOT NULL,
    output bigint NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT prices_check CHECK (((cached_input >= 0) AND (cached_input <= input))),
    CONSTRAINT prices_input_check CHECK (((input >= 0) AND (input <= '1000000000000'::bigint))),
    CONSTRAINT prices_output_check CHECK (((output >= 0) AND (output <= '1000000000000'::bigint)))
);


--
-- Name: quota_calls; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.quota_calls
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: quota_holders; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.quota_holders (
    gateway_id text NOT NULL,
    seen_at timestamp with time zone NOT NULL,
    until timestamp with time zone NOT NULL,
    exchange bigint NOT NULL,
    answer jsonb NOT NULL
);


--
-- Name: quota_leases; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.quota_leases (
    subject text NOT NULL,
    kind text NOT NULL,
    start timestamp with time zone NOT NULL,
    gateway_id text NOT NULL,
    granted bigint NOT NULL,
    answered bigint DEFAULT 0 NOT NULL
);


--
-- Name: quotas; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.quotas (
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
    CONSTRAINT quotas_weight_check CHECK (((weight >= 1) AND (weight <= 1000)))
);


--
-- Name: schema_migrations; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.schema_migrations (
    number integer NOT NULL,
    name text NOT NULL,
    sha256 text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);


--
-- Name: tenants; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.tenants (
    id text NOT NULL,
    name public.entity_name NOT NULL,
    sharing_group public.entity_name,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    pin_bytes bigint DEFAULT 0 NOT NULL,
    CONSTRAINT tenants_id_check CHECK ((id ~ '^ten_[0-9A-Za-z]{12}$'::text)),
    CONSTRAINT tenants_name_check CHECK (((name)::text !~ '^ten_'::text)),
    CONSTRAINT tenants_pin_bytes_check CHECK ((pin_bytes >= 0))
);


--
-- Name: usage; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.usage (
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
    CONSTRAINT usage_status_check CHECK ((status = ANY (ARRAY['completed'::text, 'failed'::text, 'cancelled'::text])))
)
PARTITION BY RANGE (day);


--
-- Name: usage_20261124; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.usage_20261124 (
    day date CONSTRAINT usage_day_not_null NOT NULL,
    request_id text CONSTRAINT usage_request_id_not_null NOT NULL,
    admitted_at timestamp with time zone CONSTRAINT usage_admitted_at_not_null NOT NULL,
    tenant_id text CONSTRAINT usage_tenant_id_not_null NOT NULL,
    key_id text CONSTRAINT usage_key_id_not_null NOT NULL,
    model text CONSTRAINT usage_model_not_null NOT NULL,
    adapter text,
    adapter_version integer,
    prompt_tokens bigint CONSTRAINT usage_prompt_tokens_not_null NOT NULL,
    cached_tokens bigint CONSTRAINT usage_cached_tokens_not_null NOT NULL,
    completion_tokens bigint CONSTRAINT usage_completion_tokens_not_null NOT NULL,
    ttft_ms double precision,
    duration_ms double precision CONSTRAINT usage_duration_ms_not_null NOT NULL,
    finish_reasons text[] CONSTRAINT usage_finish_reasons_not_null NOT NULL,
    worker text CONSTRAINT usage_worker_not_null NOT NULL,
    trace_id text,
    status text CONSTRAINT usage_status_not_null NOT NULL,
    gateway text DEFAULT ''::text CONSTRAINT usage_gateway_not_null NOT NULL,
    metered_tokens bigint DEFAULT 0 CONSTRAINT usage_metered_tokens_not_null NOT NULL,
    cost bigint DEFAULT 0 CONSTRAINT usage_cost_not_null NOT NULL,
    input_cost bigint DEFAULT 0 CONSTRAINT usage_input_cost_not_null NOT NULL,
    cached_input_cost bigint DEFAULT 0 CONSTRAINT usage_cached_input_cost_not_null NOT NULL,
    output_cost bigint DEFAULT 0 CONSTRAINT usage_output_cost_not_null NOT NULL,
    CONSTRAINT usage_check CHECK (((cached_tokens >= 0) AND (cached_tokens <= prompt_tokens))),
    CONSTRAINT usage_completion_tokens_check CHECK ((completion_tokens >= 0)),
    CONSTRAINT usage_prompt_tokens_check CHECK ((prompt_tokens >= 0)),
    CONSTRAINT usage_status_check CHECK ((status = ANY (ARRAY['completed'::text, 'failed'::text, 'cancelled'::text])))
);


--
-- Name: usage_20261125; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.usage_20261125 (
    day date CONSTRAINT usage_day_not_null NOT NULL,
    request_id text CONSTRAINT usage_request_id_not_null NOT NULL,
    admitted_at timestamp with time zone CONSTRAINT usage_admitted_at_not_null NOT NULL,
    tenant_id text CONSTRAINT usage_tenant_id_not_null NOT NULL,
    key_id text CONSTRAINT usage_key_id_not_null NOT NULL,
    model text CONSTRAINT usage_model_not_null NOT NULL,
    adapter text,
    adapter_version integer,
    prompt_tokens bigint CONSTRAINT usage_prompt_tokens_not_null NOT NULL,
    cached_tokens bigint CONSTRAINT usage_cached_tokens_not_null NOT NULL,
    completion_tokens bigint CONSTRAINT usage_completion_tokens_not_null NOT NULL,
    ttft_ms double precision,
    duration_ms double precision CONSTRAINT usage_duration_ms_not_null NOT NULL,
    finish_reasons text[] CONSTRAINT usage_finish_reasons_not_null NOT NULL,
    worker text CONSTRAINT usage_worker_not_null NOT NULL,
    trace_id text,
    status text CONSTRAINT usage_status_not_null NOT NULL,
    gateway text DEFAULT ''::text CONSTRAINT usage_gateway_not_null NOT NULL,
    metered_tokens bigint DEFAULT 0 CONSTRAINT usage_metered_tokens_not_null NOT NULL,
    cost bigint DEFAULT 0 CONSTRAINT usage_cost_not_null NOT NULL,
    input_cost bigint DEFAULT 0 CONSTRAINT usage_input_cost_not_null NOT NULL,
    cached_input_cost bigint DEFAULT 0 CONSTRAINT usage_cached_input_cost_not_null NOT NULL,
    output_cost bigint DEFAULT 0 CONSTRAINT usage_output_cost_not_null NOT NULL,
    CONSTRAINT usage_check CHECK (((cached_tokens >= 0) AND (cached_tokens <= prompt_tokens))),
    CONSTRAINT usage_completion_tokens_check CHECK ((completion_tokens >= 0)),
    CONSTRAINT usage_prompt_tokens_check CHECK ((prompt_tokens >= 0)),
    CONSTRAINT usage_status_check CHECK ((status = ANY (ARRAY['completed'::text, 'failed'::text, 'cancelled'::text])))
);


--
-- Name: usage_20261126; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.usage_20261126 (
    day date CONSTRAINT usage_day_not_null NOT NULL,
    request_id text CONSTRAINT usage_request_id_not_null NOT NULL,
    admitted_at timestamp with time zone CONSTRAINT usage_admitted_at_not_null NOT NULL,
    tenant_id text CONSTRAINT usage_tenant_id_not_null NOT NULL,
    key_id text CONSTRAINT usage_key_id_not_null NOT NULL,
    model text CONSTRAINT usage_model_not_null NOT NULL,
    adapter text,
    adapter_version integer,
    prompt_tokens bigint CONSTRAINT usage_prompt_tokens_not_null NOT NULL,
    cached_tokens bigint CONSTRAINT usage_cached_tokens_not_null NOT NULL,
    completion_tokens bigint CONSTRAINT usage_completion_tokens_not_null NOT NULL,
    ttft_ms double precision,
    duration_ms double precision CONSTRAINT usage_duration_ms_not_null NOT NULL,
    finish_reasons text[] CONSTRAINT usage_finish_reasons_not_null NOT NULL,
    worker text CONSTRAINT usage_worker_not_null NOT NULL,
    trace_id text,
    status text CONSTRAINT usage_status_not_null NOT NULL,
    gateway text DEFAULT ''::text CONSTRAINT usage_gateway_not_null NOT NULL,
    metered_tokens bigint DEFAULT 0 CONSTRAINT usage_metered_tokens_not_null NOT NULL,
    cost bigint DEFAULT 0 CONSTRAINT usage_cost_not_null NOT NULL,
    input_cost bigint DEFAULT 0 CONSTRAINT usage_input_cost_not_null NOT NULL,
    cached_input_cost bigint DEFAULT 0 CONSTRAINT usage_cached_input_cost_not_null NOT NULL,
    output_cost bigint DEFAULT 0 CONSTRAINT usage_output_cost_not_null NOT NULL,
    CONSTRAINT usage_check CHECK (((cached_tokens >= 0) AND (cached_tokens <= prompt_tokens))),
    CONSTRAINT usage_completion_tokens_check CHECK ((completion_tokens >= 0)),
    CONSTRAINT usage_prompt_tokens_check CHECK ((prompt_tokens >= 0)),
    CONSTRAINT usage_status_check CHECK ((status = ANY (ARRAY['completed'::text, 'failed'::text, 'cancelled'::text])))
);


--
-- Name: usage_hourly; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.usage_hourly (
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
    output_cost numeric DEFAULT 0 NOT NULL
);


--
-- Name: usage_kept; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.usage_kept (
    one boolean DEFAULT true NOT NULL,
    first_day date NOT NULL,
    CONSTRAINT usage_kept_one_check CHECK (one)
);


--
-- Name: usage_totals; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.usage_totals (
    subject text NOT NULL,
    span text NOT NULL,
    start date NOT NULL,
    metered_tokens bigint NOT NULL,
    cost numeric NOT NULL,
    CONSTRAINT usage_totals_span_check CHECK ((span = ANY (ARRAY['day'::text, 'month'::text])))
);


--
-- Name: version_outcomes; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.version_outcomes (
    change bigint NOT NULL,
    version integer NOT NULL,
    bucket timestamp with time zone NOT NULL,
    gateway_id text NOT NULL,
    requests integer NOT NULL,
    errors integer NOT NULL,
    ttft integer[] NOT NULL
);


--
-- Name: version_proving; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.version_proving (
    tenant_id text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    claimed_by text,
    claimed_until timestamp with time zone,
    attempts integer DEFAULT 0 NOT NULL,
    detail text
);


--
-- Name: workers; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.workers (
    id text NOT NULL,
    address text NOT NULL,
    registered_at timestamp with time zone DEFAULT now() NOT NULL,
    leased_until timestamp with time zone,
    draining boolean,
    status jsonb,
    reported_at timestamp with time zone,
    reported_by text,
    CONSTRAINT workers_address_check CHECK (((length(address) >= 1) AND (length(address) <= 512))),
    CONSTRAINT workers_id_check CHECK (((length(id) >= 1) AND (length(id) <= 256))),
    CONSTRAINT workers_reachable CHECK (((leased_until IS NULL) OR (address ~ '^unix:/.'::text) OR ((address ~ '^tcp://.+:[0-9]{1,5}$'::text) AND (("substring"(address, '[0-9]+$'::text))::numeric < (65536)::numeric))))
);


--
-- Name: usage_20261124; Type: TABLE ATTACH; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage ATTACH PARTITION public.usage_20261124 FOR VALUES FROM ('2026-11-24') TO ('2026-11-25');


--
-- Name: usage_20261125; Type: TABLE ATTACH; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage ATTACH PARTITION public.usage_20261125 FOR VALUES FROM ('2026-11-25') TO ('2026-11-26');


--
-- Name: usage_20261126; Type: TABLE ATTACH; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage ATTACH PARTITION public.usage_20261126 FOR VALUES FROM ('2026-11-26') TO ('2026-11-27');


--
-- Data for Name: adapter_faults; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: adapter_proofs; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.adapter_proofs VALUES
	('223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267', 'd3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb', '1-2x7-float32-rn', '7735b17dc326576455d13015e28189eddd10aead0c3c9aee0da0f2b795a06edf', '{"effect": 0.8588733673095703, "tokens": [91, 52, 139, 221, 262, 122, 65, 140], "logprobs": [-4.502196311950684, -4.637340068817139, -4.64928674697876, -4.682456970214844, -4.688659191131592, -4.737961769104004, -4.7539262771606445, -4.811574459075928]}', 'worker-f9b0ac0f1792', '2026-11-24 10:46:36.904982+00'),
	('2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb', 'd3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb', '1-2x7-float32-rn', 'd6927531ed0392fbcd69acb41f46f254ec4580bcd68da7ff611b54b04aba35ab', '{"effect": 1.167914867401123, "tokens": [248, 236, 198, 187, 96, 133, 51, 256], "logprobs": [-4.560629844665527, -4.571072578430176, -4.61417293548584, -4.632850646972656, -4.658093452453613, -4.67520809173584, -4.692050933837891, -4.7163496017456055]}', 'worker-f9b0ac0f1792', '2026-11-24 10:46:37.247296+00'),
	('725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630', 'd3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb', '1-2x7-float32-rn', '0c31253f18d0167be662758944d4d61d3c3698e85d0f538502f317b541f59295', '{"effect": 0.6198439598083496, "tokens": [248, 51, 149, 217, 120, 46, 256, 104], "logprobs": [-4.426097869873047, -4.551389217376709, -4.65529727935791, -4.6861371994018555, -4.688595294952393, -4.706362724304199, -4.729817867279053, -4.7416791915893555]}', 'worker-f9b0ac0f1792', '2026-11-24 10:46:37.655029+00');


--
-- Data for Name: adapter_versions; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.adapter_versions VALUES
	('ten_WNJBhD8Qisfh', 'bot', 1, 'ready', '223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267', 'tiny', '{"digest": "223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267", "layers": [0, 1], "max_rank": 2, "warnings": [], "file_bytes": 7397, "base_digest": "d3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb", "projections": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "num_parameters": 1856, "invocation_tokens": []}', NULL, '2026-11-24 10:46:36.79381+00', '{}', NULL, 'ajTuEm3VWBH8', 19, NULL, NULL),
	('ten_WNJBhD8Qisfh', 'bot', 2, 'ready', '2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb', 'tiny', '{"digest": "2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb", "layers": [0, 1], "max_rank": 2, "warnings": [], "file_bytes": 7397, "base_digest": "d3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb", "projections": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "num_parameters": 1856, "invocation_tokens": []}', NULL, '2026-11-24 10:46:37.162773+00', '{}', NULL, 'ajTuEm3VWBH8', 28, NULL, NULL),
	('ten_pd3LfAuG86nw', 'helper', 1, 'ready', '725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630', 'tiny', '{"digest": "725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630", "layers": [0, 1], "max_rank": 2, "warnings": [], "file_bytes": 7397, "base_digest": "d3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb", "projections": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "num_parameters": 1856, "invocation_tokens": []}', NULL, '2026-11-24 10:46:37.517839+00', '{}', NULL, 'ajTuEm3VWBH8', 38, NULL, NULL);


--
-- Data for Name: adapters; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.adapters VALUES
	('ten_WNJBhD8Qisfh', 'bot', 2, '2026-11-24 10:46:36.79381+00'),
	('ten_pd3LfAuG86nw', 'helper', 1, '2026-11-24 10:46:37.517839+00');


--
-- Data for Name: alias_history; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.alias_history OVERRIDING SYSTEM VALUE VALUES
	(1, 'ten_WNJBhD8Qisfh', 'bot', 'prod', 1, NULL, 'ajTuEm3VWBH8', '2026-11-24 10:46:36.904982+00', NULL, NULL, 'first', NULL),
	(2, 'ten_WNJBhD8Qisfh', 'bot', 'beta', 2, NULL, 'ajTuEm3VWBH8', '2026-11-24 10:46:37.247296+00', NULL, NULL, 'upload', NULL),
	(3, 'ten_pd3LfAuG86nw', 'helper', 'prod', 1, NULL, 'ajTuEm3VWBH8', '2026-11-24 10:46:37.655029+00', NULL, NULL, 'first', NULL);


--
-- Data for Name: aliases; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.aliases VALUES
	('ten_WNJBhD8Qisfh', 'bot', 'prod', 1, NULL, false, 1),
	('ten_WNJBhD8Qisfh', 'bot', 'beta', 2, NULL, false, 2),
	('ten_pd3LfAuG86nw', 'helper', 'prod', 1, NULL, false, 3);


--
-- Data for Name: api_keys; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.api_keys VALUES
	('ajTuEm3VWBH8', NULL, 'serve', '\xef01853c4510f53f25c1ece2ed13d3092e59da06ddb328f82db805a101d423f7', '{admin}', NULL, NULL, '2026-11-24 10:46:31.968614+00', NULL, NULL, NULL, NULL, NULL),
	('rwCI5EhtBSm8', 'ten_WNJBhD8Qisfh', 'test', '\xf0e34cc351ccb53768cbf1a51439d4b6a8badbb621bfaf422317aef8d4780705', '{adapters:write,inference,usage:read}', NULL, NULL, '2026-11-24 10:46:35.21298+00', NULL, NULL, NULL, NULL, NULL),
	('Qr1kqzZD5R7y', 'ten_pd3LfAuG86nw', 'test', '\x0dd20b0d503e8dbd9b41bb6c412cc7efe3e6229c48fc63e30f26e5ae11c7b9bb', '{adapters:write,inference,usage:read}', NULL, NULL, '2026-11-24 10:46:35.622384+00', NULL, NULL, NULL, NULL, NULL),
	('LwWyUUYqal1Y', 'ten_WNJBhD8Qisfh', 'revoked', '\xd424a9b47e18451f70897609f54d546fd4aa2de2c00feaf7dca15f67fa5a8fd3', '{adapters:write,inference,usage:read}', NULL, '2026-11-24 10:46:36.444856+00', '2026-11-24 10:46:36.249066+00', NULL, NULL, NULL, NULL, NULL);


--
-- Data for Name: approved_templates; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: audit_log; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.audit_log VALUES
	(1, '2026-11-24 10:46:31.976168+00', 'system', NULL, 'key.create', 'ajTuEm3VWBH8', '{"id": "ajTuEm3VWBH8", "name": "serve", "cidrs": null, "family": null, "models": null, "scopes": ["admin"], "replaces": null, "tenant_id": null, "created_at": "2026-11-24T10:46:31.968614+00:00", "expires_at": null, "not_before": null, "revoked_at": null}', NULL, '\x0000000000000000000000000000000000000000000000000000000000000000', '\x93880d66df005c0b123d5654700b5c19ab80421e18a280de278824298ee28786'),
	(2, '2026-11-24 10:46:31.996919+00', 'system', NULL, 'model.create', 'tiny', '{"name": "tiny", "digest": "d3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb", "residency": "auto", "created_at": "2026-11-24T10:46:31.980534+00:00", "max_model_len": 2048}', NULL, '\x93880d66df005c0b123d5654700b5c19ab80421e18a280de278824298ee28786', '\x6adf0b296e0fff2d3b22057aa98a0f67bd47960a3e77887c41cb2d4242435f97'),
	(3, '2026-11-24 10:46:35.183555+00', 'ajTuEm3VWBH8', 'ten_WNJBhD8Qisfh', 'tenant.create', 'ten_WNJBhD8Qisfh', '{"id": "ten_WNJBhD8Qisfh", "name": "acme", "pin_bytes": 0, "created_at": "2026-11-24T10:46:35.171777+00:00", "sharing_group": null}', 'req_3855512c8524479baa08f1ce27e3ae8b', '\x6adf0b296e0fff2d3b22057aa98a0f67bd47960a3e77887c41cb2d4242435f97', '\x6543bad0cc62daeee5d4fe85af45012f0ca38e0009ab08781ffe1c6045654ecb'),
	(4, '2026-11-24 10:46:35.215219+00', 'ajTuEm3VWBH8', 'ten_WNJBhD8Qisfh', 'key.create', 'rwCI5EhtBSm8', '{"id": "rwCI5EhtBSm8", "name": "test", "cidrs": null, "family": null, "models": null, "scopes": ["adapters:write", "inference", "usage:read"], "replaces": null, "tenant_id": "ten_WNJBhD8Qisfh", "created_at": "2026-11-24T10:46:35.21298+00:00", "expires_at": null, "not_before": null, "revoked_at": null}', 'req_edee9c247dd6459a94577f62a878d9cb', '\x6543bad0cc62daeee5d4fe85af45012f0ca38e0009ab08781ffe1c6045654ecb', '\xe60da56c67518fbdb35b46f9668ef87fadcf134b6c9f471b6a34e73488e46c26'),
	(5, '2026-11-24 10:46:35.429213+00', 'ajTuEm3VWBH8', 'ten_pd3LfAuG86nw', 'tenant.create', 'ten_pd3LfAuG86nw', '{"id": "ten_pd3LfAuG86nw", "name": "globex", "pin_bytes": 0, "created_at": "2026-11-24T10:46:35.428583+00:00", "sharing_group": null}', 'req_d183e0d8bdf740d78221000097713df0', '\xe60da56c67518fbdb35b46f9668ef87fadcf134b6c9f471b6a34e73488e46c26', '\xec46aed12d536dd0d834ae9c7d2615eb9655008e30aa63ba597db9dea7012eca'),
	(6, '2026-11-24 10:46:35.623334+00', 'ajTuEm3VWBH8', 'ten_pd3LfAuG86nw', 'key.create', 'Qr1kqzZD5R7y', '{"id": "Qr1kqzZD5R7y", "name": "test", "cidrs": null, "family": null, "models": null, "scopes": ["adapters:write", "inference", "usage:read"], "replaces": null, "tenant_id": "ten_pd3LfAuG86nw", "created_at": "2026-11-24T10:46:35.622384+00:00", "expires_at": null, "not_before": null, "revoked_at": null}', 'req_4d97afc7d75a4817828fb99cd1a95308', '\xec46aed12d536dd0d834ae9c7d2615eb9655008e30aa63ba597db9dea7012eca', '\xa39e787455a86aebc90809885e641ce7c2183a057686947518a30938293d511b'),
	(7, '2026-11-24 10:46:35.841733+00', 'ajTuEm3VWBH8', 'ten_WNJBhD8Qisfh', 'quota.create', 'ten_WNJBhD8Qisfh', '{"class": "standard", "key_id": null, "weight": 1, "subject": "ten_WNJBhD8Qisfh", "adapters": null, "tenant_id": "ten_WNJBhD8Qisfh", "adapter_bytes": null, "cached_weight": 100, "spend_per_day": null, "tokens_per_day": 1000000, "spend_per_month": 100000000000000, "tokens_per_month": null, "tokens_per_minute": null, "concurrent_requests": null, "requests_per_minute": 1000}', 'req_51f81950dfba47b2a8b57446b335fae6', '\xa39e787455a86aebc90809885e641ce7c2183a057686947518a30938293d511b', '\xef3d8748f89b34ca22bfde01ec622bd66279a8f18c1c1c3af09998e48cd81fc9'),
	(8, '2026-11-24 10:46:36.021124+00', 'ajTuEm3VWBH8', NULL, 'price.create', 'tiny', '{"input": 250000, "model": "tiny", "output": 1500000, "cached_input": 50000}', 'req_f151c1edccf8462b88f795d5760853f7', '\xef3d8748f89b34ca22bfde01ec622bd66279a8f18c1c1c3af09998e48cd81fc9', '\xf099ba892969800e4238ecaa4a1b2243208f8299e4fd163a14e1bd5a306f9f4f'),
	(9, '2026-11-24 10:46:36.250048+00', 'ajTuEm3VWBH8', 'ten_WNJBhD8Qisfh', 'key.create', 'LwWyUUYqal1Y', '{"id": "LwWyUUYqal1Y", "name": "revoked", "cidrs": null, "family": null, "models": null, "scopes": ["adapters:write", "inference", "usage:read"], "replaces": null, "tenant_id": "ten_WNJBhD8Qisfh", "created_at": "2026-11-24T10:46:36.249066+00:00", "expires_at": null, "not_before": null, "revoked_at": null}', 'req_cc379a4ee64844c197d62fc09a915835', '\xf099ba892969800e4238ecaa4a1b2243208f8299e4fd163a14e1bd5a306f9f4f', '\x6b7736840a6185bd95ca358414e35ed4fc8acec9b0d908b8c1885f9b349b9a1b'),
	(10, '2026-11-24 10:46:36.446857+00', 'ajTuEm3VWBH8', 'ten_WNJBhD8Qisfh', 'key.revoke', 'LwWyUUYqal1Y', '{"revoked_at": [null, "2026-11-24T10:46:36.444856+00:00"]}', 'req_bbebec96ca62476689860a6b40268c2a', '\x6b7736840a6185bd95ca358414e35ed4fc8acec9b0d908b8c1885f9b349b9a1b', '\x079af5160d8992aa6c342dd90132950dbf2bc039abe4d87c891443772ae4dc69'),
	(11, '2026-11-24 10:46:36.795261+00', 'ajTuEm3VWBH8', 'ten_WNJBhD8Qisfh', 'adapter.create', 'bot', '{"name": "bot", "tenant_id": "ten_WNJBhD8Qisfh", "created_at": "2026-11-24T10:46:36.79381+00:00"}', 'req_e5e0424920dc460b98aaf9ff08ca71d7', '\x079af5160d8992aa6c342dd90132950dbf2bc039abe4d87c891443772ae4dc69', '\x543a996e79f28621201a08a7b56d00c1d21e09e459abc8e57084a867b718b8ac'),
	(12, '2026-11-24 10:46:36.801782+00', 'ajTuEm3VWBH8', 'ten_WNJBhD8Qisfh', 'version.create', 'bot@1', '{"name": "bot", "error": null, "state": "proving", "digest": "223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267", "version": 1, "base_name": "tiny", "tenant_id": "ten_WNJBhD8Qisfh", "created_at": "2026-11-24T10:46:36.79381+00:00", "retired_at": null, "uploaded_by": "ajTuEm3VWBH8", "wanted_alias": null}', 'req_e5e0424920dc460b98aaf9ff08ca71d7', '\x543a996e79f28621201a08a7b56d00c1d21e09e459abc8e57084a867b718b8ac', '\x0c97c8a87d0cdb393138720f67f08a5a7b1bd85ed13ba13ff387e3c1fffe45bd'),
	(13, '2026-11-24 10:46:36.909389+00', 'system', 'ten_WNJBhD8Qisfh', 'version.ready', 'bot@1', '{"state": ["proving", "ready"]}', NULL, '\x0c97c8a87d0cdb393138720f67f08a5a7b1bd85ed13ba13ff387e3c1fffe45bd', '\x076c9d657951a486dce671a76b0287b690796f07d4481d545ca57cf93b571a40'),
	(14, '2026-11-24 10:46:36.911646+00', 'system', 'ten_WNJBhD8Qisfh', 'alias.first', 'bot@prod', '{"name": "bot", "alias": "prod", "canary": null, "detail": null, "policy": null, "reason": "first", "version": 1, "previous": null, "tenant_id": "ten_WNJBhD8Qisfh", "changed_by": "ajTuEm3VWBH8"}', NULL, '\x076c9d657951a486dce671a76b0287b690796f07d4481d545ca57cf93b571a40', '\x960d117d7e4b2b467d7001d165dbc24d454350af354a4100ec4430dc9d13a552'),
	(15, '2026-11-24 10:46:37.165361+00', 'ajTuEm3VWBH8', 'ten_WNJBhD8Qisfh', 'version.create', 'bot@2', '{"name": "bot", "error": null, "state": "proving", "digest": "2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb", "version": 2, "base_name": "tiny", "tenant_id": "ten_WNJBhD8Qisfh", "created_at": "2026-11-24T10:46:37.162773+00:00", "retired_at": null, "uploaded_by": "ajTuEm3VWBH8", "wanted_alias": "beta"}', 'req_4fd1219ca4c54df3b523931c99233a7e', '\x960d117d7e4b2b467d7001d165dbc24d454350af354a4100ec4430dc9d13a552', '\x7a4c028d4acf015be138409148fb06904dd8b698bde76c6fcc133a2b3474f886'),
	(16, '2026-11-24 10:46:37.248728+00', 'system', 'ten_WNJBhD8Qisfh', 'version.ready', 'bot@2', '{"state": ["proving", "ready"]}', NULL, '\x7a4c028d4acf015be138409148fb06904dd8b698bde76c6fcc133a2b3474f886', '\xb07cdb48d4a8fcc9e1ca06f21b66761bb726d8e4f22accff93bc87cfe62dfc37'),
	(17, '2026-11-24 10:46:37.249515+00', 'system', 'ten_WNJBhD8Qisfh', 'alias.upload', 'bot@beta', '{"name": "bot", "alias": "beta", "canary": null, "detail": null, "policy": null, "reason": "upload", "version": 2, "previous": null, "tenant_id": "ten_WNJBhD8Qisfh", "changed_by": "ajTuEm3VWBH8"}', NULL, '\xb07cdb48d4a8fcc9e1ca06f21b66761bb726d8e4f22accff93bc87cfe62dfc37', '\x17710299038815637037361e854f12d601742330e1811b95a8316e3a23603711'),
	(18, '2026-11-24 10:46:37.251173+00', 'system', 'ten_WNJBhD8Qisfh', 'version.update', 'bot@2', '{"wanted_alias": ["beta", null]}', NULL, '\x17710299038815637037361e854f12d601742330e1811b95a8316e3a23603711', '\xd7a50520c4ba176f7b2ad743882c732986b5d1b6fb0abde157eddb108eaa302b'),
	(19, '2026-11-24 10:46:37.51849+00', 'ajTuEm3VWBH8', 'ten_pd3LfAuG86nw', 'adapter.create', 'helper', '{"name": "helper", "tenant_id": "ten_pd3LfAuG86nw", "created_at": "2026-11-24T10:46:37.517839+00:00"}', 'req_0363c16f65c2407bbc395e27c00223fa', '\xd7a50520c4ba176f7b2ad743882c732986b5d1b6fb0abde157eddb108eaa302b', '\x46976662c098455250c0ff8f5e8860794e4d64b80716b2b612acdc8e4c70605e'),
	(20, '2026-11-24 10:46:37.519628+00', 'ajTuEm3VWBH8', 'ten_pd3LfAuG86nw', 'version.create', 'helper@1', '{"name": "helper", "error": null, "state": "proving", "digest": "725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630", "version": 1, "base_name": "tiny", "tenant_id": "ten_pd3LfAuG86nw", "created_at": "2026-11-24T10:46:37.517839+00:00", "retired_at": null, "uploaded_by": "ajTuEm3VWBH8", "wanted_alias": null}', 'req_0363c16f65c2407bbc395e27c00223fa', '\x46976662c098455250c0ff8f5e8860794e4d64b80716b2b612acdc8e4c70605e', '\xa5541407c1f132570696be61e6ea49fb330bad3b0d94a7f764636998d05c880a'),
	(21, '2026-11-24 10:46:37.656354+00', 'system', 'ten_pd3LfAuG86nw', 'version.ready', 'helper@1', '{"state": ["proving", "ready"]}', NULL, '\xa5541407c1f132570696be61e6ea49fb330bad3b0d94a7f764636998d05c880a', '\x94ce40bfcf577c8105e63fafabbef2d5b278b5538dacbd67a349dc24980476d8'),
	(22, '2026-11-24 10:46:37.656934+00', 'system', 'ten_pd3LfAuG86nw', 'alias.first', 'helper@prod', '{"name": "helper", "alias": "prod", "canary": null, "detail": null, "policy": null, "reason": "first", "version": 1, "previous": null, "tenant_id": "ten_pd3LfAuG86nw", "changed_by": "ajTuEm3VWBH8"}', NULL, '\x94ce40bfcf577c8105e63fafabbef2d5b278b5538dacbd67a349dc24980476d8', '\x8624c5691e252bd9f37e262d278a70829d7679490e7ba6f9e588df121b26bc1c');


--
-- Data for Name: base_models; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.base_models VALUES
	('tiny', 'd3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb', '{"digest": "d3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb", "head_dim": 16, "num_heads": 2, "model_type": "llama", "num_layers": 2, "vocab_size": 264, "hidden_size": 32, "num_kv_heads": 1, "intermediate_size": 48, "tie_word_embeddings": false}', 2048, '2026-11-24 10:46:31.980534+00', 'auto');


--
-- Data for Name: canary_targets; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: catalog_changes; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.catalog_changes VALUES
	('ten_pd3LfAuG86nw', 7, ''),
	('ten_WNJBhD8Qisfh', 14, ''),
	('ten_WNJBhD8Qisfh', 33, 'bot'),
	('ten_pd3LfAuG86nw', 40, 'helper');


--
-- Data for Name: catalog_generation; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.catalog_generation VALUES
	(true, 42);


--
-- Data for Name: gateways; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.gateways VALUES
	('gateway-vm-a38d4a158744', 42, '{}', '2026-11-24 10:46:33.738706+00', '2026-11-24 10:46:38.845445+00');


--
-- Data for Name: idempotent_requests; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: key_uses; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: loose_contents; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: prices; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.prices VALUES
	('tiny', 250000, 50000, 1500000, '2026-11-24 10:46:36.018118+00');


--
-- Data for Name: quota_holders; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.quota_holders VALUES
	('gateway-vm-a38d4a158744', '2026-11-24 10:46:38.74051+00', '2026-11-24 10:51:38.74051+00', 7, '[]');


--
-- Data for Name: quota_leases; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.quota_leases VALUES
	('ten_WNJBhD8Qisfh', 'requests_per_minute', '2026-11-24 10:46:00+00', 'gateway-vm-a38d4a158744', 500, 0),
	('ten_WNJBhD8Qisfh', 'spend_per_month', '2026-11-01 00:00:00+00', 'gateway-vm-a38d4a158744', 49999960250000, 0),
	('ten_WNJBhD8Qisfh', 'tokens_per_day', '2026-11-24 00:00:00+00', 'gateway-vm-a38d4a158744', 499961, 0);


--
-- Data for Name: quotas; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.quotas VALUES
	('ten_WNJBhD8Qisfh', 'ten_WNJBhD8Qisfh', NULL, 1000, NULL, NULL, 1000000, NULL, NULL, 100000000000000, NULL, NULL, 100, '2026-11-24 10:46:35.837848+00', 1, 'standard');


--
-- Data for Name: schema_migrations; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.schema_migrations VALUES
	(1, '0001_pre_catalog.sql', 'caa250ce21e46b54948c712697ccc04e8f08931783cd3c866addd241631016c4', '2026-11-24 10:46:31.86657+00'),
	(2, '0002_pre_lifecycle.sql', 'c04d1a7c32fe6ea38dea37045a1f57dc65ef0a3f0f3193a69070e7e9550cbb0b', '2026-11-24 10:46:31.882713+00'),
	(3, '0003_pre_keys_audit.sql', '4be26c9c88e1eb16d035f741348344e7d5aee9cc7aaf52b56674e21fa15badaf', '2026-11-24 10:46:31.901542+00'),
	(4, '0004_pre_usage.sql', '1da4974383b27106c503acd67e3570f0f4d0a44effe34f59818a700df0d66578', '2026-11-24 10:46:31.907382+00'),
	(5, '0005_pre_quotas.sql', '210b3df7afff75541b226365907d6f4fb42625f643d1020d78318d6d7b1957f5', '2026-11-24 10:46:31.911755+00'),
	(6, '0006_pre_roles.sql', '3608c07765e0e3bfc707404281cffd70631d3bea3a9d6d48daa3b3bbb74f7548', '2026-11-24 10:46:31.925+00'),
	(7, '0007_pre_idempotency.sql', '88063458d131518460104a5949cc518a7bf760de1c02b8e93aedb6be33ae106e', '2026-11-24 10:46:31.931789+00'),
	(8, '0008_pre_workers.sql', '75752c817b09ca9c645984a51a853cb596ad87293bfd3e483f6ee2e09d6088af', '2026-11-24 10:46:31.934681+00'),
	(9, '0009_pre_cost_parts.sql', '974a0fd83a1d4395555b4e37795c505f2ef03c65645fc923d2aa65ad897020bd', '2026-11-24 10:46:31.939519+00'),
	(10, '0010_pre_key_families.sql', '59676254d7760b388b510ee0cd7d63db4ce7b86253a78b43714ef0ddaec494a2', '2026-11-24 10:46:31.941027+00'),
	(11, '0011_pre_large_debts.sql', '9e9782ca88da55d815129e77ab7af7ae9aec6034d9649ce399596e9754220a4f', '2026-11-24 10:46:31.941452+00'),
	(12, '0012_pre_exchanges.sql', '77dac1de715d4ff0ba1d6c9da017dd71dacd90acd81c1dbae00ad1293be948cb', '2026-11-24 10:46:31.942742+00'),
	(13, '0013_pre_quota_upkeep.sql', '31fe19588263756040b723e9316d273f41e0dcd658f9fa8a284f9b0ff89694bf', '2026-11-24 10:46:31.944045+00'),
	(14, '0014_pre_catalog_changes.sql', 'd422c4a0b9a212d7280bcea3651cb6b499ae9a5f356ef8d1d9a7e84959c19e8a', '2026-11-24 10:46:31.945581+00'),
	(15, '0015_pre_adapter_changes.sql', 'a9ca0bc3330581e23c419bb62be52ec78540bf1584ee48b4b19bafc7d748dde9', '2026-11-24 10:46:31.952327+00');


--
-- Data for Name: tenants; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.tenants VALUES
	('ten_WNJBhD8Qisfh', 'acme', NULL, '2026-11-24 10:46:35.171777+00', 0),
	('ten_pd3LfAuG86nw', 'globex', NULL, '2026-11-24 10:46:35.428583+00', 0);


--
-- Data for Name: usage_20261124; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.usage_20261124 VALUES
	('2026-11-24', '0295a8f7e068d53a0771d3ac71debf0e', '2026-11-24 10:46:38.028197+00', 'ten_WNJBhD8Qisfh', 'rwCI5EhtBSm8', 'tiny', 'bot', 1, 5, 0, 8, 4.113, 8.509, '{length}', 'worker-f9b0ac0f1792', NULL, 'completed', 'gateway-vm-a38d4a158744', 13, 13250000, 1250000, 0, 12000000),
	('2026-11-24', '3d4efcdafd325acc39530b9dbb97cb88', '2026-11-24 10:46:38.094851+00', 'ten_pd3LfAuG86nw', 'Qr1kqzZD5R7y', 'tiny', 'helper', 1, 5, 0, 8, 3.255, 8.041, '{length}', 'worker-f9b0ac0f1792', NULL, 'completed', 'gateway-vm-a38d4a158744', 13, 13250000, 1250000, 0, 12000000),
	('2026-11-24', '71e6ae9780274211f33fb58c88f0c428', '2026-11-24 10:46:38.061508+00', 'ten_WNJBhD8Qisfh', 'rwCI5EhtBSm8', 'tiny', 'bot', 2, 5, 0, 8, 3.574, 8.926, '{length}', 'worker-f9b0ac0f1792', NULL, 'completed', 'gateway-vm-a38d4a158744', 13, 13250000, 1250000, 0, 12000000),
	('2026-11-24', '9cecea94b6db0cb450a895b5193a37db', '2026-11-24 10:46:37.988674+00', 'ten_WNJBhD8Qisfh', 'rwCI5EhtBSm8', 'tiny', NULL, NULL, 5, 0, 8, 18.465, 18.76, '{length}', 'worker-f9b0ac0f1792', NULL, 'completed', 'gateway-vm-a38d4a158744', 13, 13250000, 1250000, 0, 12000000);


--
-- Data for Name: usage_20261125; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: usage_20261126; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: usage_hourly; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.usage_hourly VALUES
	('2026-11-24 10:00:00+00', 'ten_WNJBhD8Qisfh', 'tiny', '', 'rwCI5EhtBSm8', 1, 5, 0, 8, 0, 13, 13250000, 1250000, 0, 12000000),
	('2026-11-24 10:00:00+00', 'ten_WNJBhD8Qisfh', 'tiny', 'bot', 'rwCI5EhtBSm8', 1, 5, 0, 8, 1, 13, 13250000, 1250000, 0, 12000000),
	('2026-11-24 10:00:00+00', 'ten_WNJBhD8Qisfh', 'tiny', 'bot', 'rwCI5EhtBSm8', 1, 5, 0, 8, 2, 13, 13250000, 1250000, 0, 12000000),
	('2026-11-24 10:00:00+00', 'ten_pd3LfAuG86nw', 'tiny', 'helper', 'Qr1kqzZD5R7y', 1, 5, 0, 8, 1, 13, 13250000, 1250000, 0, 12000000);


--
-- Data for Name: usage_kept; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.usage_kept VALUES
	(true, '2026-08-27');


--
-- Data for Name: usage_totals; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.usage_totals VALUES
	('Qr1kqzZD5R7y', 'day', '2026-11-24', 13, 13250000),
	('Qr1kqzZD5R7y', 'month', '2026-11-01', 13, 13250000),
	('rwCI5EhtBSm8', 'day', '2026-11-24', 39, 39750000),
	('rwCI5EhtBSm8', 'month', '2026-11-01', 39, 39750000),
	('ten_WNJBhD8Qisfh', 'day', '2026-11-24', 39, 39750000),
	('ten_WNJBhD8Qisfh', 'month', '2026-11-01', 39, 39750000),
	('ten_pd3LfAuG86nw', 'day', '2026-11-24', 13, 13250000),
	('ten_pd3LfAuG86nw', 'month', '2026-11-01', 13, 13250000);


--
-- Data for Name: version_outcomes; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: version_proving; Type: TABLE DATA; Schema: public; Owner: -
--



--
-- Data for Name: workers; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.workers VALUES
	('worker-f9b0ac0f1792', 'unix:/tmp/tmpofoe4fl2/data/socket/worker.sock', '2026-11-24 10:46:35.738718+00', NULL, NULL, '{"step": 6, "type": "status", "models": [{"name": "tiny", "tier": "device", "error": "", "digest": "d3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb", "idle_s": 0.18207753799651982, "load_s": 0.0036785999982384965, "num_bytes": 282240, "num_swaps": 1, "pages_free": 261660, "num_running": 0, "num_waiting": 0, "pages_total": 261664, "max_num_seqs": 64, "pages_cached": 4, "decode_step_s": 0.00047746000200277194, "num_preemptions": 0, "prefix_hit_tokens": 0, "num_waiting_tokens": 0, "prefill_tokens_per_s": 15740.1871652608, "num_adapter_evictions": 0, "prefix_queried_tokens": 67, "num_integrity_failures": 0}], "extents": "wk.................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................................a", "tenants": [{"tenant": "", "kv_bytes": 16384, "adapter_bytes": 196608}], "adapters": [{"tier": "device", "error": "", "digest": "223cc147f0d6ec0895137746a8651dbbc314c0f8307a3a6a6112f8533fa77267", "leases": 0, "pinned": false, "message": "", "num_bytes": 65536}, {"tier": "device", "error": "", "digest": "2061d28da692df217412c094c13371c4c85d9ce8f06038aeff19842a834ba5eb", "leases": 0, "pinned": false, "message": "", "num_bytes": 65536}, {"tier": "device", "error": "", "digest": "725e6cbb01df6a8fd6e21184174b7c793dd17cb4f7e46086ef08facec1496630", "leases": 0, "pinned": false, "message": "", "num_bytes": 65536}], "draining": false, "settings": {"ops": "cpu", "dtype": "float32", "store": "/tmp/tmpofoe4fl2/data/store", "health": "unix:/tmp/tmpofoe4fl2/data/socket/worker-health.sock", "listen": "unix:/tmp/tmpofoe4fl2/data/socket/worker.sock", "memory": "1073741824", "models": "{''tiny'': ''d3ca5e07407431a59eb67369daf6095790accd809b116ffb5b5a139f41a94beb''}", "drain_s": "120.0", "threads": "1", "security": "Security(tls=None, insecure=False)", "cache_dir": "/tmp/tmpofoe4fl2/data/cache", "log_format": "text", "max_queued": "1024", "runs_ahead": "None", "max_num_seqs": "64", "adapter_cache": "17179869184", "device_memory": "None", "keeps_weights": "False", "max_model_len": "None", "replays_steps": "None", "max_queue_wait": "150.0", "max_model_wait_s": "30.0", "max_model_drain_s": "10.0", "max_queued_tokens": "1048576", "adapter_memory_max": "None", "adapter_memory_min": "0", "max_batched_tokens": "512", "host_adapter_memory": "1073741824", "max_loaded_adapters": "128"}, "generation": 36, "arena_bytes": 1074003968, "instance_id": "worker-f9b0ac0f1792", "tokens_per_s": 1.9413485226569127}', '2026-11-24 10:46:38.746689+00', 'gateway-vm-a38d4a158744');


--
-- Name: alias_history_id_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.alias_history_id_seq', 3, true);


--
-- Name: quota_calls; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.quota_calls', 1, false);


--
-- Name: adapter_faults adapter_faults_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.adapter_faults
    ADD CONSTRAINT adapter_faults_pkey PRIMARY KEY (digest, worker);


--
-- Name: adapter_proofs adapter_proofs_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.adapter_proofs
    ADD CONSTRAINT adapter_proofs_pkey PRIMARY KEY (digest, base_digest, layout);


--
-- Name: adapter_versions adapter_versions_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.adapter_versions
    ADD CONSTRAINT adapter_versions_pkey PRIMARY KEY (tenant_id, name, version);


--
-- Name: adapters adapters_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.adapters
    ADD CONSTRAINT adapters_pkey PRIMARY KEY (tenant_id, name);


--
-- Name: alias_history alias_history_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.alias_history
    ADD CONSTRAINT alias_history_pkey PRIMARY KEY (id);


--
-- Name: aliases aliases_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.aliases
    ADD CONSTRAINT aliases_pkey PRIMARY KEY (tenant_id, name, alias);


--
-- Name: api_keys api_keys_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT api_keys_pkey PRIMARY KEY (id);


--
-- Name: approved_templates approved_templates_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.approved_templates
    ADD CONSTRAINT approved_templates_pkey PRIMARY KEY (digest);


--
-- Name: audit_log audit_log_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.audit_log
    ADD CONSTRAINT audit_log_pkey PRIMARY KEY (seq);


--
-- Name: base_models base_models_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.base_models
    ADD CONSTRAINT base_models_pkey PRIMARY KEY (name);


--
-- Name: canary_targets canary_targets_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.canary_targets
    ADD CONSTRAINT canary_targets_pkey PRIMARY KEY (tenant_id, name, alias, version);


--
-- Name: catalog_changes catalog_changes_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.catalog_changes
    ADD CONSTRAINT catalog_changes_pkey PRIMARY KEY (tenant_id, name);


--
-- Name: catalog_generation catalog_generation_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.catalog_generation
    ADD CONSTRAINT catalog_generation_pkey PRIMARY KEY (one);


--
-- Name: gateways gateways_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.gateways
    ADD CONSTRAINT gateways_pkey PRIMARY KEY (id);


--
-- Name: idempotent_requests idempotent_requests_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.idempotent_requests
    ADD CONSTRAINT idempotent_requests_pkey PRIMARY KEY (id);


--
-- Name: key_uses key_uses_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.key_uses
    ADD CONSTRAINT key_uses_pkey PRIMARY KEY (key_id);


--
-- Name: loose_contents loose_contents_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.loose_contents
    ADD CONSTRAINT loose_contents_pkey PRIMARY KEY (digest, holder);


--
-- Name: prices prices_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.prices
    ADD CONSTRAINT prices_pkey PRIMARY KEY (model);


--
-- Name: quota_holders quota_holders_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.quota_holders
    ADD CONSTRAINT quota_holders_pkey PRIMARY KEY (gateway_id);


--
-- Name: quota_leases quota_leases_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.quota_leases
    ADD CONSTRAINT quota_leases_pkey PRIMARY KEY (subject, kind, start, gateway_id);


--
-- Name: quotas quotas_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.quotas
    ADD CONSTRAINT quotas_pkey PRIMARY KEY (subject);


--
-- Name: schema_migrations schema_migrations_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.schema_migrations
    ADD CONSTRAINT schema_migrations_pkey PRIMARY KEY (number);


--
-- Name: tenants tenants_name_key; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT tenants_name_key UNIQUE (name);


--
-- Name: tenants tenants_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.tenants
    ADD CONSTRAINT tenants_pkey PRIMARY KEY (id);


--
-- Name: usage usage_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage
    ADD CONSTRAINT usage_pkey PRIMARY KEY (day, request_id);


--
-- Name: usage_20261124 usage_20261124_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage_20261124
    ADD CONSTRAINT usage_20261124_pkey PRIMARY KEY (day, request_id);


--
-- Name: usage_20261125 usage_20261125_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage_20261125
    ADD CONSTRAINT usage_20261125_pkey PRIMARY KEY (day, request_id);


--
-- Name: usage_20261126 usage_20261126_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage_20261126
    ADD CONSTRAINT usage_20261126_pkey PRIMARY KEY (day, request_id);


--
-- Name: usage_hourly usage_hourly_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage_hourly
    ADD CONSTRAINT usage_hourly_pkey PRIMARY KEY (hour, tenant_id, model, adapter, adapter_version, key_id);


--
-- Name: usage_kept usage_kept_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage_kept
    ADD CONSTRAINT usage_kept_pkey PRIMARY KEY (one);


--
-- Name: usage_totals usage_totals_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.usage_totals
    ADD CONSTRAINT usage_totals_pkey PRIMARY KEY (subject, span, start);


--
-- Name: version_outcomes version_outcomes_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.version_outcomes
    ADD CONSTRAINT version_outcomes_pkey PRIMARY KEY (change, version, bucket, gateway_id);


--
-- Name: version_proving version_proving_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.version_proving
    ADD CONSTRAINT version_proving_pkey PRIMARY KEY (tenant_id, name, version);


--
-- Name: workers workers_pkey; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (id);


--
-- Name: adapter_versions_base; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX adapter_versions_base ON public.adapter_versions USING btree (base_name);


--
-- Name: adapter_versions_content; Type: INDEX; Schema: public; Owner: -
--

CREATE UNIQUE INDEX adapter_versions_content ON public.adapter_versions USING btree (tenant_id, name, base_name, digest, md5((serving)::text)) WHERE (state = ANY (ARRAY['proving'::text, 'ready'::text]));


--
-- Name: adapter_versions_digest; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX adapter_versions_digest ON public.adapter_versions USING btree (digest);


--
-- Name: adapter_versions_unsettled; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX adapter_versions_unsettled ON public.adapter_versions USING btree (state) WHERE (state = ANY (ARRAY['proving'::text, 'retired'::text]));


--
-- Name: adapters_name; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX adapters_name ON public.adapters USING btree (name);


--
-- Name: alias_history_alias; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX alias_history_alias ON public.alias_history USING btree (tenant_id, name, alias, id);


--
-- Name: aliases_version; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX aliases_version ON public.aliases USING btree (tenant_id, name, version);


--
-- Name: api_keys_tenant; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX api_keys_tenant ON public.api_keys USING btree (tenant_id);


--
-- Name: audit_log_object; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX audit_log_object ON public.audit_log USING btree (object, seq);


--
-- Name: audit_log_tenant; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX audit_log_tenant ON public.audit_log USING btree (tenant_id, seq);


--
-- Name: canary_targets_version; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX canary_targets_version ON public.canary_targets USING btree (tenant_id, name, version);


--
-- Name: catalog_changes_generation; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX catalog_changes_generation ON public.catalog_changes USING btree (generation);


--
-- Name: idempotent_requests_age; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX idempotent_requests_age ON public.idempotent_requests USING btree (created_at);


--
-- Name: quota_leases_gateway; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX quota_leases_gateway ON public.quota_leases USING btree (gateway_id);


--
-- Name: quotas_key; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX quotas_key ON public.quotas USING btree (key_id);


--
-- Name: quotas_tenant; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX quotas_tenant ON public.quotas USING btree (tenant_id);


--
-- Name: usage_admitted; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_admitted ON ONLY public.usage USING btree (admitted_at);


--
-- Name: usage_20261124_admitted_at_idx; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_20261124_admitted_at_idx ON public.usage_20261124 USING btree (admitted_at);


--
-- Name: usage_tenant; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_tenant ON ONLY public.usage USING btree (tenant_id, admitted_at);


--
-- Name: usage_20261124_tenant_id_admitted_at_idx; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_20261124_tenant_id_admitted_at_idx ON public.usage_20261124 USING btree (tenant_id, admitted_at);


--
-- Name: usage_20261125_admitted_at_idx; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_20261125_admitted_at_idx ON public.usage_20261125 USING btree (admitted_at);


--
-- Name: usage_20261125_tenant_id_admitted_at_idx; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_20261125_tenant_id_admitted_at_idx ON public.usage_20261125 USING btree (tenant_id, admitted_at);


--
-- Name: usage_20261126_admitted_at_idx; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_20261126_admitted_at_idx ON public.usage_20261126 USING btree (admitted_at);


--
-- Name: usage_20261126_tenant_id_admitted_at_idx; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_20261126_tenant_id_admitted_at_idx ON public.usage_20261126 USING btree (tenant_id, admitted_at);


--
-- Name: usage_hourly_tenant; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_hourly_tenant ON public.usage_hourly USING btree (tenant_id, hour);


--
-- Name: usage_totals_start; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX usage_totals_start ON public.usage_totals USING btree (start);


--
-- Name: version_outcomes_bucket; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX version_outcomes_bucket ON public.version_outcomes USING btree (bucket);


--
-- Name: usage_20261124_admitted_at_idx; Type: INDEX ATTACH; Schema: public; Owner: -
--

ALTER INDEX public.usage_admitted ATTACH PARTITION public.usage_20261124_admitted_at_idx;


--
-- Name: usage_20261124_pkey; Type: INDEX ATTACH; Schema: public; Owner: -
--

ALTER INDEX public.usage_pkey ATTACH PARTITION public.usage_20261124_pkey;


--
-- Name: usage_20261124_tenant_id_admitted_at_idx; Type: INDEX ATTACH; Schema: public; Owner: -
--

ALTER INDEX public.usage_tenant ATTACH PARTITION public.usage_20261124_tenant_id_admitted_at_idx;


--
-- Name: usage_20261125_admitted_at_idx; Type: INDEX ATTACH; Schema: public; Owner: -
--

ALTER INDEX public.usage_admitted ATTACH PARTITION public.usage_20261125_admitted_at_idx;


--
-- Name: usage_20261125_pkey; Type: INDEX ATTACH; Schema: public; Owner: -
--

ALTER INDEX public.usage_pkey ATTACH PARTITION public.usage_20261125_pkey;


--
-- Name: usage_20261125_tenant_id_admitted_at_idx; Type: INDEX ATTACH; Schema: public; Owner: -
--

ALTER INDEX public.usage_tenant ATTACH PARTITION public.usage_20261125_tenant_id_admitted_at_idx;


--
-- Name: usage_20261126_admitted_at_idx; Type: INDEX ATTACH; Schema: public; Owner: -
--

ALTER INDEX public.usage_admitted ATTACH PARTITION public.usage_20261126_admitted_at_idx;


--
-- Name: usage_20261126_pkey; Type: INDEX ATTACH; Schema: public; Owner: -
--

ALTER INDEX public.usage_pkey ATTACH PARTITION public.usage_20261126_pkey;


--
-- Name: usage_20261126_tenant_id_admitted_at_idx; Type: INDEX ATTACH; Schema: public; Owner: -
--

ALTER INDEX public.usage_tenant ATTACH PARTITION public.usage_20261126_tenant_id_admitted_at_idx;


--
-- Name: adapter_proofs a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.adapter_proofs FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: adapter_versions a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.adapter_versions FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: adapters a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.adapters FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: aliases a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.aliases FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: api_keys a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.api_keys FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: approved_templates a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.approved_templates FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: base_models a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.base_models FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: canary_targets a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.canary_targets FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: prices a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.prices FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: quotas a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.quotas FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: tenants a_bump; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER a_bump BEFORE INSERT OR DELETE OR UPDATE OR TRUNCATE ON public.tenants FOR EACH STATEMENT EXECUTE FUNCTION public.bump_catalog();


--
-- Name: adapter_versions audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON public.adapter_versions FOR EACH ROW EXECUTE FUNCTION public.audit_change('version', 'name,version', 'manifest,serving,ready_generation,retired_generation');


--
-- Name: adapters audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER INSERT OR DELETE ON public.adapters FOR EACH ROW EXECUTE FUNCTION public.audit_change('adapter', 'name', 'last_version');


--
-- Name: alias_history audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER INSERT ON public.alias_history FOR EACH ROW EXECUTE FUNCTION public.audit_change('alias', 'name,alias', 'id,changed_at');


--
-- Name: api_keys audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON public.api_keys FOR EACH ROW EXECUTE FUNCTION public.audit_change('key', 'id', 'hash');


--
-- Name: approved_templates audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON public.approved_templates FOR EACH ROW EXECUTE FUNCTION public.audit_change('template', 'digest', '');


--
-- Name: base_models audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON public.base_models FOR EACH ROW EXECUTE FUNCTION public.audit_change('model', 'name', 'shape');


--
-- Name: prices audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON public.prices FOR EACH ROW EXECUTE FUNCTION public.audit_change('price', 'model', 'updated_at');


--
-- Name: quotas audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON public.quotas FOR EACH ROW EXECUTE FUNCTION public.audit_change('quota', 'subject', 'updated_at');


--
-- Name: tenants audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER INSERT OR DELETE OR UPDATE ON public.tenants FOR EACH ROW EXECUTE FUNCTION public.audit_change('tenant', 'id', '');


--
-- Name: workers audit; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit AFTER UPDATE OF draining ON public.workers FOR EACH ROW EXECUTE FUNCTION public.audit_change('worker', 'id', 'leased_until,status,reported_at,reported_by');


--
-- Name: aliases audit_pin; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER audit_pin AFTER UPDATE OF pinned ON public.aliases FOR EACH ROW EXECUTE FUNCTION public.audit_change('alias', 'name,alias', '');


--
-- Name: workers bump_delete; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER bump_delete AFTER DELETE ON public.workers FOR EACH ROW WHEN (((old.leased_until IS NOT NULL) OR (old.draining IS NOT NULL))) EXECUTE FUNCTION public.bump_catalog();


--
-- Name: workers bump_insert; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER bump_insert AFTER INSERT ON public.workers FOR EACH ROW WHEN ((new.leased_until IS NOT NULL)) EXECUTE FUNCTION public.bump_catalog();


--
-- Name: workers bump_update; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER bump_update AFTER UPDATE ON public.workers FOR EACH ROW WHEN ((((old.address IS DISTINCT FROM new.address) OR ((old.leased_until IS NULL) IS DISTINCT FROM (new.leased_until IS NULL))) OR (old.draining IS DISTINCT FROM new.draining))) EXECUTE FUNCTION public.bump_catalog();


--
-- Name: audit_log chain; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER chain BEFORE INSERT ON public.audit_log FOR EACH ROW EXECUTE FUNCTION public.audit_chain();


--
-- Name: adapter_versions immutable; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER immutable BEFORE UPDATE ON public.adapter_versions FOR EACH ROW EXECUTE FUNCTION public.keep_version_immutable();


--
-- Name: adapters names_apart; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER names_apart BEFORE INSERT OR UPDATE OF name ON public.adapters FOR EACH ROW EXECUTE FUNCTION public.keep_names_apart();


--
-- Name: base_models names_apart; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER names_apart BEFORE INSERT OR UPDATE OF name ON public.base_models FOR EACH ROW EXECUTE FUNCTION public.keep_names_apart();


--
-- Name: adapter_proofs note_delete; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_delete AFTER DELETE ON public.adapter_proofs REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_proof();


--
-- Name: adapter_versions note_delete; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_delete AFTER DELETE ON public.adapter_versions REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_adapter();


--
-- Name: aliases note_delete; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_delete AFTER DELETE ON public.aliases REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_adapter();


--
-- Name: api_keys note_delete; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_delete AFTER DELETE ON public.api_keys REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_tenant();


--
-- Name: canary_targets note_delete; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_delete AFTER DELETE ON public.canary_targets REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_adapter();


--
-- Name: quotas note_delete; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_delete AFTER DELETE ON public.quotas REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_tenant();


--
-- Name: tenants note_delete; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_delete AFTER DELETE ON public.tenants REFERENCING OLD TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_tenant_change();


--
-- Name: adapter_proofs note_insert; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_insert AFTER INSERT ON public.adapter_proofs REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_proof();


--
-- Name: adapter_versions note_insert; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_insert AFTER INSERT ON public.adapter_versions REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_adapter();


--
-- Name: aliases note_insert; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_insert AFTER INSERT ON public.aliases REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_adapter();


--
-- Name: api_keys note_insert; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_insert AFTER INSERT ON public.api_keys REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_tenant();


--
-- Name: canary_targets note_insert; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_insert AFTER INSERT ON public.canary_targets REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_adapter();


--
-- Name: quotas note_insert; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_insert AFTER INSERT ON public.quotas REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_tenant();


--
-- Name: tenants note_insert; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_insert AFTER INSERT ON public.tenants REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_tenant_change();


--
-- Name: adapter_proofs note_update; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_update AFTER UPDATE ON public.adapter_proofs REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_proof();


--
-- Name: adapter_versions note_update; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_update AFTER UPDATE ON public.adapter_versions REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_adapter();


--
-- Name: aliases note_update; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_update AFTER UPDATE ON public.aliases REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_adapter();


--
-- Name: api_keys note_update; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_update AFTER UPDATE ON public.api_keys REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_tenant();


--
-- Name: canary_targets note_update; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_update AFTER UPDATE ON public.canary_targets REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_adapter();


--
-- Name: quotas note_update; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_update AFTER UPDATE ON public.quotas REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_change_of_tenant();


--
-- Name: tenants note_update; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER note_update AFTER UPDATE ON public.tenants REFERENCING NEW TABLE AS changed FOR EACH STATEMENT EXECUTE FUNCTION public.note_tenant_change();


--
-- Name: audit_log only_grows; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER only_grows BEFORE DELETE OR UPDATE OR TRUNCATE ON public.audit_log FOR EACH STATEMENT EXECUTE FUNCTION public.refuse_audit_change();


--
-- Name: adapter_versions adapter_versions_base_name_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.adapter_versions
    ADD CONSTRAINT adapter_versions_base_name_fkey FOREIGN KEY (base_name) REFERENCES public.base_models(name);


--
-- Name: adapter_versions adapter_versions_tenant_id_name_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.adapter_versions
    ADD CONSTRAINT adapter_versions_tenant_id_name_fkey FOREIGN KEY (tenant_id, name) REFERENCES public.adapters(tenant_id, name) ON DELETE CASCADE;


--
-- Name: adapters adapters_tenant_id_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.adapters
    ADD CONSTRAINT adapters_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;


--
-- Name: alias_history alias_history_tenant_id_name_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.alias_history
    ADD CONSTRAINT alias_history_tenant_id_name_fkey FOREIGN KEY (tenant_id, name) REFERENCES public.adapters(tenant_id, name) ON DELETE CASCADE;


--
-- Name: aliases aliases_tenant_id_name_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.aliases
    ADD CONSTRAINT aliases_tenant_id_name_fkey FOREIGN KEY (tenant_id, name) REFERENCES public.adapters(tenant_id, name) ON DELETE CASCADE;


--
-- Name: aliases aliases_tenant_id_name_version_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.aliases
    ADD CONSTRAINT aliases_tenant_id_name_version_fkey FOREIGN KEY (tenant_id, name, version) REFERENCES public.adapter_versions(tenant_id, name, version) DEFERRABLE INITIALLY DEFERRED;


--
-- Name: api_keys api_keys_tenant_id_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.api_keys
    ADD CONSTRAINT api_keys_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;


--
-- Name: canary_targets canary_targets_tenant_id_name_alias_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.canary_targets
    ADD CONSTRAINT canary_targets_tenant_id_name_alias_fkey FOREIGN KEY (tenant_id, name, alias) REFERENCES public.aliases(tenant_id, name, alias) ON DELETE CASCADE;


--
-- Name: canary_targets canary_targets_tenant_id_name_version_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.canary_targets
    ADD CONSTRAINT canary_targets_tenant_id_name_version_fkey FOREIGN KEY (tenant_id, name, version) REFERENCES public.adapter_versions(tenant_id, name, version) DEFERRABLE INITIALLY DEFERRED;


--
-- Name: key_uses key_uses_key_id_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.key_uses
    ADD CONSTRAINT key_uses_key_id_fkey FOREIGN KEY (key_id) REFERENCES public.api_keys(id) ON DELETE CASCADE;


--
-- Name: prices prices_model_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.prices
    ADD CONSTRAINT prices_model_fkey FOREIGN KEY (model) REFERENCES public.base_models(name) ON DELETE CASCADE;


--
-- Name: quota_leases quota_leases_gateway_id_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.quota_leases
    ADD CONSTRAINT quota_leases_gateway_id_fkey FOREIGN KEY (gateway_id) REFERENCES public.quota_holders(gateway_id) ON DELETE CASCADE;


--
-- Name: quotas quotas_key_id_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.quotas
    ADD CONSTRAINT quotas_key_id_fkey FOREIGN KEY (key_id) REFERENCES public.api_keys(id) ON DELETE CASCADE;


--
-- Name: quotas quotas_tenant_id_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.quotas
    ADD CONSTRAINT quotas_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES public.tenants(id) ON DELETE CASCADE;


--
-- Name: version_outcomes version_outcomes_change_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.version_outcomes
    ADD CONSTRAINT version_outcomes_change_fkey FOREIGN KEY (change) REFERENCES public.alias_history(id) ON DELETE CASCADE;


--
-- Name: version_proving version_proving_tenant_id_name_version_fkey; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.version_proving
    ADD CONSTRAINT version_proving_tenant_id_name_version_fkey FOREIGN KEY (tenant_id, name, version) REFERENCES public.adapter_versions(tenant_id, name, version) ON DELETE CASCADE;


--
-- Name: adapter_versions; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.adapter_versions ENABLE ROW LEVEL SECURITY;

--
-- Name: adapters; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.adapters ENABLE ROW LEVEL SECURITY;

--
-- Name: alias_history; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.alias_history ENABLE ROW LEVEL SECURITY;

--
-- Name: aliases; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.aliases ENABLE ROW LEVEL SECURITY;

--
-- Name: api_keys; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.api_keys ENABLE ROW LEVEL SECURITY;

--
-- Name: audit_log; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.audit_log ENABLE ROW LEVEL SECURITY;

--
-- Name: canary_targets; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.canary_targets ENABLE ROW LEVEL SECURITY;

--
-- Name: catalog_changes; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.catalog_changes ENABLE ROW LEVEL SECURITY;

--
-- Name: idempotent_requests; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.idempotent_requests ENABLE ROW LEVEL SECURITY;

--
-- Name: key_uses; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.key_uses ENABLE ROW LEVEL SECURITY;

--
-- Name: quota_holders; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.quota_holders ENABLE ROW LEVEL SECURITY;

--
-- Name: quota_leases; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.quota_leases ENABLE ROW LEVEL SECURITY;

--
-- Name: quotas; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.quotas ENABLE ROW LEVEL SECURITY;

--
-- Name: adapter_versions tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.adapter_versions TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: adapters tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.adapters TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: alias_history tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.alias_history TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: aliases tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.aliases TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: api_keys tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.api_keys TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: audit_log tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.audit_log TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: canary_targets tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.canary_targets TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: catalog_changes tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.catalog_changes TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: idempotent_requests tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.idempotent_requests TO loraplex_app USING ((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text));


--
-- Name: key_uses tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.key_uses TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (EXISTS ( SELECT
   FROM public.api_keys k
  WHERE (k.id = key_uses.key_id)))));


--
-- Name: quota_holders tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.quota_holders TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR false));


--
-- Name: quota_leases tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.quota_leases TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (subject = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting)) OR (EXISTS ( SELECT
   FROM public.api_keys k
  WHERE (k.id = quota_leases.subject)))));


--
-- Name: quotas tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.quotas TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: tenants tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.tenants TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: usage tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.usage TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: usage_hourly tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.usage_hourly TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: usage_totals tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.usage_totals TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (subject = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting)) OR (EXISTS ( SELECT
   FROM public.api_keys k
  WHERE (k.id = usage_totals.subject)))));


--
-- Name: version_outcomes tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.version_outcomes TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (EXISTS ( SELECT
   FROM public.alias_history h
  WHERE (h.id = version_outcomes.change)))));


--
-- Name: version_proving tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.version_proving TO loraplex_app USING (((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text) OR (tenant_id = ( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting))));


--
-- Name: workers tenant; Type: POLICY; Schema: public; Owner: -
--

CREATE POLICY tenant ON public.workers TO loraplex_app USING ((( SELECT current_setting('loraplex.tenant'::text, true) AS current_setting) = '*'::text));


--
-- Name: tenants; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.tenants ENABLE ROW LEVEL SECURITY;

--
-- Name: usage; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.usage ENABLE ROW LEVEL SECURITY;

--
-- Name: usage_hourly; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.usage_hourly ENABLE ROW LEVEL SECURITY;

--
-- Name: usage_totals; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.usage_totals ENABLE ROW LEVEL SECURITY;

--
-- Name: version_outcomes; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.version_outcomes ENABLE ROW LEVEL SECURITY;

--
-- Name: version_proving; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.version_proving ENABLE ROW LEVEL SECURITY;

--
-- Name: workers; Type: ROW SECURITY; Schema: public; Owner: -
--

ALTER TABLE public.workers ENABLE ROW LEVEL SECURITY;

--
-- Name: FUNCTION audit_change(); Type: ACL; Schema: public; Owner: -
--

REVOKE ALL ON FUNCTION public.audit_change() FROM PUBLIC;
GRANT ALL ON FUNCTION public.audit_change() TO loraplex_app;


--
-- Name: FUNCTION content_is_free(of_digest text); Type: ACL; Schema: public; Owner: -
--

REVOKE ALL ON FUNCTION public.content_is_free(of_digest text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.content_is_free(of_digest text) TO loraplex_app;


--
-- Name: TABLE api_keys; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.api_keys TO loraplex_app;


--
-- Name: FUNCTION key_by_id(of_id text); Type: ACL; Schema: public; Owner: -
--

REVOKE ALL ON FUNCTION public.key_by_id(of_id text) FROM PUBLIC;
GRANT ALL ON FUNCTION public.key_by_id(of_id text) TO loraplex_app;


--
-- Name: FUNCTION note_change_of_adapter(); Type: ACL; Schema: public; Owner: -
--

REVOKE ALL ON FUNCTION public.note_change_of_adapter() FROM PUBLIC;


--
-- Name: FUNCTION note_change_of_tenant(); Type: ACL; Schema: public; Owner: -
--

REVOKE ALL ON FUNCTION public.note_change_of_tenant() FROM PUBLIC;


--
-- Name: FUNCTION note_proof(); Type: ACL; Schema: public; Owner: -
--

REVOKE ALL ON FUNCTION public.note_proof() FROM PUBLIC;


--
-- Name: FUNCTION note_tenant_change(); Type: ACL; Schema: public; Owner: -
--

REVOKE ALL ON FUNCTION public.note_tenant_change() FROM PUBLIC;


--
-- Name: FUNCTION usage_drop_before(of_day date); Type: ACL; Schema: public; Owner: -
--

REVOKE ALL ON FUNCTION public.usage_drop_before(of_day date) FROM PUBLIC;
GRANT ALL ON FUNCTION public.usage_drop_before(of_day date) TO loraplex_app;


--
-- Name: FUNCTION usage_make_partition(of_day date); Type: ACL; Schema: public; Owner: -
--

REVOKE ALL ON FUNCTION public.usage_make_partition(of_day date) FROM PUBLIC;
GRANT ALL ON FUNCTION public.usage_make_partition(of_day date) TO loraplex_app;


--
-- Name: TABLE adapter_faults; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.adapter_faults TO loraplex_app;


--
-- Name: TABLE adapter_proofs; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE ON TABLE public.adapter_proofs TO loraplex_app;


--
-- Name: TABLE adapter_versions; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.adapter_versions TO loraplex_app;


--
-- Name: TABLE adapters; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.adapters TO loraplex_app;


--
-- Name: TABLE alias_history; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE ON TABLE public.alias_history TO loraplex_app;


--
-- Name: TABLE aliases; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.aliases TO loraplex_app;


--
-- Name: TABLE approved_templates; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE ON TABLE public.approved_templates TO loraplex_app;


--
-- Name: TABLE audit_log; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT ON TABLE public.audit_log TO loraplex_app;


--
-- Name: TABLE base_models; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.base_models TO loraplex_app;


--
-- Name: TABLE canary_targets; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.canary_targets TO loraplex_app;


--
-- Name: TABLE catalog_changes; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT ON TABLE public.catalog_changes TO loraplex_app;


--
-- Name: TABLE catalog_generation; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,UPDATE ON TABLE public.catalog_generation TO loraplex_app;


--
-- Name: TABLE gateways; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.gateways TO loraplex_app;


--
-- Name: TABLE idempotent_requests; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.idempotent_requests TO loraplex_app;


--
-- Name: TABLE key_uses; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,UPDATE ON TABLE public.key_uses TO loraplex_app;


--
-- Name: TABLE loose_contents; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.loose_contents TO loraplex_app;


--
-- Name: TABLE prices; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.prices TO loraplex_app;


--
-- Name: SEQUENCE quota_calls; Type: ACL; Schema: public; Owner: -
--

GRANT USAGE ON SEQUENCE public.quota_calls TO loraplex_app;


--
-- Name: TABLE quota_holders; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.quota_holders TO loraplex_app;


--
-- Name: TABLE quota_leases; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.quota_leases TO loraplex_app;


--
-- Name: TABLE quotas; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.quotas TO loraplex_app;


--
-- Name: TABLE schema_migrations; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT ON TABLE public.schema_migrations TO loraplex_app;


--
-- Name: TABLE tenants; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.tenants TO loraplex_app;


--
-- Name: TABLE usage; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT ON TABLE public.usage TO loraplex_app;


--
-- Name: TABLE usage_hourly; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,UPDATE ON TABLE public.usage_hourly TO loraplex_app;


--
-- Name: TABLE usage_kept; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT ON TABLE public.usage_kept TO loraplex_app;


--
-- Name: TABLE usage_totals; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.usage_totals TO loraplex_app;


--
-- Name: TABLE version_outcomes; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.version_outcomes TO loraplex_app;


--
-- Name: TABLE version_proving; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.version_proving TO loraplex_app;


--
-- Name: TABLE workers; Type: ACL; Schema: public; Owner: -
--

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE public.workers TO loraplex_app;


--
-- PostgreSQL database dump complete
--

\unrestrict HDdIjTCeHcJV6KkH1yOFROnEwAHsEbMF1XR5Phj1MEtZHvCDH4NSXTKCxWhq2lV


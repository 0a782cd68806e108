-- Limits of tenants and keys, prices of models, and the slices of each limit that gateways hold.

-- Money is counted in pico-dollars: a price in micro-dollars for a million tokens is that many of them a token.

CREATE TABLE quotas (
    subject             text PRIMARY KEY, -- id of the tenant or of the key
    tenant_id           text NOT NULL REFERENCES tenants ON DELETE CASCADE,
    key_id              text REFERENCES api_keys ON DELETE CASCADE, -- null: of the tenant as a whole
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
    CHECK (subject = coalesce(key_id, tenant_id)),
    CHECK (key_id IS NULL OR num_nonnulls(adapters, adapter_bytes) = 0 AND cached_weight = 100)
);
CREATE INDEX quotas_tenant ON quotas (tenant_id);
CREATE INDEX quotas_key ON quotas (key_id);

-- A model without a price costs nothing.
CREATE TABLE prices (
    model        entity_name PRIMARY KEY REFERENCES base_models ON DELETE CASCADE,
    input        bigint NOT NULL CHECK (input BETWEEN 0 AND 1000000000000), -- pico-dollars a token
    cached_input bigint NOT NULL CHECK (cached_input BETWEEN 0 AND input),
    output       bigint NOT NULL CHECK (output BETWEEN 0 AND 1000000000000),
    updated_at   timestamptz NOT NULL DEFAULT now()
);

CREATE TRIGGER a_bump BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON quotas
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER a_bump BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON prices
    FOR EACH STATEMENT EXECUTE FUNCTION bump_catalog();
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON quotas
    FOR EACH ROW EXECUTE FUNCTION audit_change('quota', 'subject', 'updated_at');
CREATE TRIGGER audit AFTER INSERT OR UPDATE OR DELETE ON prices
    FOR EACH ROW EXECUTE FUNCTION audit_change('price', 'model', 'updated_at');

ALTER TABLE usage
    ADD COLUMN gateway        text NOT NULL DEFAULT '',
    ADD COLUMN metered_tokens bigint NOT NULL DEFAULT 0, -- as quotas count them: cached ones by their weight
    ADD COLUMN cost           bigint NOT NULL DEFAULT 0; -- pico-dollars, at the prices of its admission
ALTER TABLE usage_hourly
    ADD COLUMN adapter_version integer NOT NULL DEFAULT 0, -- 0: the base model alone, or counted before there was this column
    ADD COLUMN metered_tokens  bigint NOT NULL DEFAULT 0,
    ADD COLUMN cost            numeric NOT NULL DEFAULT 0,
    DROP CONSTRAINT usage_hourly_pkey,
    ADD PRIMARY KEY (hour, tenant_id, model, adapter, adapter_version, key_id);

-- What a tenant or a key has used since a day or a month began, as far as it is loaded.
CREATE TABLE usage_totals (
    subject        text NOT NULL,
    span           text NOT NULL CHECK (span IN ('day', 'month')),
    start          date NOT NULL,
    metered_tokens bigint NOT NULL,
    cost           numeric NOT NULL,
    PRIMARY KEY (subject, span, start)
);

-- Gateways that hold slices. From then on one that is not heard of gives out nothing any more; see quota_counts.
CREATE TABLE quota_holders (
    gateway_id text PRIMARY KEY,
    seen_at    timestamptz NOT NULL,
    until      timestamptz NOT NULL,
    exchange   bigint NOT NULL, -- number of its last one
    answer     jsonb NOT NULL   -- what it was told then, should it not have heard it
);

-- What of a limit each gateway may give out by itself: what it has promised, what it has used and not loaded yet, and
-- what it holds ready. For each limit: loaded use + the sum of these <= the limit, unless that was lowered since.
CREATE TABLE quota_leases (
    subject    text NOT NULL,
    kind       text NOT NULL, -- the column of quotas
    start      timestamptz NOT NULL, -- of the minute, day or month; '-infinity': of all times
    gateway_id text NOT NULL REFERENCES quota_holders ON DELETE CASCADE,
    granted    bigint NOT NULL,
    answered   bigint NOT NULL DEFAULT 0, -- the newest call to give back that it has followed
    PRIMARY KEY (subject, kind, start, gateway_id)
);
CREATE INDEX quota_leases_gateway ON quota_leases (gateway_id);
CREATE SEQUENCE quota_calls;

-- Whether what a gateway holds of a limit is still kept for it. Of a budget that is so for another hour, or until its
-- spool is loaded and it is forgotten: it may have used what nobody here knows of yet.
CREATE FUNCTION quota_counts(kind text, until timestamptz) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT until > now() - CASE WHEN split_part(kind, '_per_', 2) IN ('day', 'month') THEN interval '1 hour'
                                ELSE interval '0' END
$$;

-- One exchange of a gateway, which numbers them from 1; the same number again gets the same answer and changes nothing.
-- Null: it has been away for so long that it holds nothing any more.
-- Of each limit in `asks`, [{subject, kind, start, taken, returned, answered, need, want, call}], it
-- adds what was `taken` without asking, takes back what is `returned`, notes the call that this answers, then grants
-- `need` or nothing, and up to `want` or a fair slice if there is enough. If `need` is not there, the others are called to
-- give back what they hold ready; asked again with that `call`, `unanswered` says how many have not followed it yet.
-- The answer: [{granted, remaining, unanswered, call}], `remaining` null if there is no such limit any more.
CREATE FUNCTION quota_exchange(of_gateway text, number bigint, lifetime interval, asks jsonb)
RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    holder     quota_holders%ROWTYPE;
    holders    bigint;
    ask        record;
    of_all     bigint;
    spoken_for numeric; -- used or held
    free       bigint;
    gift       bigint;
    calling    bigint;
    missing    bigint;
    answers    jsonb := '{}';
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
        free := of_all - spoken_for - ask.taken + ask.returned;
        gift := CASE
            WHEN of_all IS NULL OR ask.need > free OR ask.need + ask.want = 0 THEN 0
            ELSE greatest(0, least(free, greatest(ask.want, ask.need, free / (2 * holders)))) END;
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
        answers := jsonb_set(answers, ARRAY[ask.place::text], jsonb_build_object(
            'granted', gift, 'remaining', free - gift, 'unanswered', missing, 'call', calling));
    END LOOP;
    SELECT coalesce(jsonb_agg(value ORDER BY key::bigint), '[]') INTO answers FROM jsonb_each(answers);
    UPDATE quota_holders SET seen_at = now(), until = now() + lifetime, exchange = number, answer = answers
        WHERE gateway_id = of_gateway;
    RETURN answers;
END $$;

-- Forgets what nobody holds any more. Slices of a minute end with it.
CREATE FUNCTION quota_upkeep() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM quota_holders WHERE NOT quota_counts('any_per_day', until);
    DELETE FROM quota_leases l USING quota_holders h
        WHERE h.gateway_id = l.gateway_id AND NOT quota_counts(l.kind, h.until);
    DELETE FROM quota_leases
        WHERE granted = 0
            OR kind IN ('requests_per_minute', 'tokens_per_minute') AND start < now() - interval '2 minutes';
    DELETE FROM usage_totals WHERE start < (now() - interval '400 days')::date;
END $$;

-- quota_exchange as before, but for two things. An exchange about thousands of limits takes as long for each as one about
-- a few: the answers were one growing object, copied for each, and from some three thousand on nobody waited for them. And
-- nobody gives back what is not his any more: of a rate, what a gateway held is gone when it has not been heard of for long;
-- it went below nothing when that gateway came back and returned it, and the others were given as much beyond the limit.

CREATE OR REPLACE FUNCTION quota_exchange(of_gateway text, number bigint, lifetime interval, asks jsonb)
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

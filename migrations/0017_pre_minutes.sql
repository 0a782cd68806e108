-- What gateways held of a minute outlives them: a minute has no loaded total, so its leases are the only record of what was
-- used of it. They were deleted with their holder, and a gateway that was started again was granted the limit once more.

-- Holder of what gateways that are gone held of minutes. It is never heard of and never expires.
INSERT INTO quota_holders (gateway_id, seen_at, until, exchange, answer) VALUES ('', '-infinity', 'infinity', 0, '[]');

-- Whether what a gateway holds of a limit still counts. Of a minute it does until the minute is over. Of a day or a month it
-- does for another hour, or until its spool is loaded and it is forgotten: it may have used what is not loaded yet.
CREATE OR REPLACE FUNCTION quota_counts(kind text, until timestamptz) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT split_part(kind, '_per_', 2) = 'minute'
        OR until > now() - CASE WHEN split_part(kind, '_per_', 2) IN ('day', 'month') THEN interval '1 hour'
                                ELSE interval '0' END
$$;

-- Minutes that are over are left to go with their holder.
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

CREATE TRIGGER keep_minutes BEFORE DELETE ON quota_holders FOR EACH ROW EXECUTE FUNCTION keep_minutes();

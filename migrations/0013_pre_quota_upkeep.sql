-- quota_upkeep as before, but that it waits for nobody and nobody for it: an exchange locks slices in their order, the
-- upkeep in that of the disk, and each could have what the other wanted next. What is in use is left for another time. And
-- what is past is found without reading all totals, which are those of every key for more than a year.

CREATE INDEX usage_totals_start ON usage_totals (start);

CREATE OR REPLACE FUNCTION quota_upkeep() RETURNS void LANGUAGE plpgsql AS $$
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

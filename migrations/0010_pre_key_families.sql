-- A key has the limits of the one that it was rotated from, and spends on that one's account: limits, slices and totals
-- have the first of such a row as their subject. A key that was rotated before there was this column is a first one.

ALTER TABLE api_keys
    ADD COLUMN family text; -- id of the first one; null: it is that itself

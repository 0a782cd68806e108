-- name: price_list
SELECT {columns of admin.prices.prices.PriceDetails} FROM prices WHERE model > $1 ORDER BY model LIMIT $2;

-- name: price_find
SELECT {columns of admin.prices.prices.PriceDetails} FROM prices WHERE model = $1;

-- name: price_put
INSERT INTO prices ({columns of store.records.Price}) VALUES ({values of store.records.Price})
ON CONFLICT (model) DO UPDATE
SET {updates of store.records.Price}, updated_at = now();

-- name: price_delete
DELETE FROM prices WHERE model = $1;

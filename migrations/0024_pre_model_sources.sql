-- The name under which a base model's weights were imported: adapters say by it what they were trained on.

ALTER TABLE base_models ADD COLUMN source text NOT NULL DEFAULT '';

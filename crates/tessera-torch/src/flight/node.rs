//! The values of a dump, in the pickle and in the JSON form alike.

use std::rc::Rc;

use serde_json::Value as Json;

use super::pickle::PickleValue;

/// A value of a dump in either form.
pub(super) trait Node: Sized {
    fn field(&self, key: &str) -> Option<Self>;
    fn fields(&self) -> Vec<(String, Self)>;
    fn items(&self) -> Vec<Self>;
    fn text(&self) -> Option<Rc<str>>;
    fn int(&self) -> Option<i64>;
    fn flag(&self) -> bool;
}

impl Node for PickleValue {
    fn field(&self, key: &str) -> Option<PickleValue> {
        self.get(key)
    }

    fn fields(&self) -> Vec<(String, PickleValue)> {
        self.pairs().into_iter().filter_map(|(k, v)| Some((k.as_text()?.to_string(), v))).collect()
    }

    fn items(&self) -> Vec<PickleValue> {
        PickleValue::items(self).unwrap_or_default()
    }

    fn text(&self) -> Option<Rc<str>> {
        self.as_text()
    }

    fn int(&self) -> Option<i64> {
        self.as_int()
    }

    fn flag(&self) -> bool {
        self.as_bool() == Some(true)
    }
}

impl Node for Json {
    fn field(&self, key: &str) -> Option<Json> {
        self.get(key).cloned()
    }

    fn fields(&self) -> Vec<(String, Json)> {
        let pairs = self.as_object().into_iter().flatten();
        pairs.map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    fn items(&self) -> Vec<Json> {
        self.as_array().cloned().unwrap_or_default()
    }

    fn text(&self) -> Option<Rc<str>> {
        self.as_str().map(Rc::from)
    }

    fn int(&self) -> Option<i64> {
        self.as_i64()
    }

    fn flag(&self) -> bool {
        self.as_bool() == Some(true)
    }
}

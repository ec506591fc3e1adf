//! The values that are in effect on a backend: its device, its libraries, and the implementation of
//! each class of shapes of the loaded programs.

use std::collections::BTreeMap;

use tessera_ir::{OpView, Program, views};

use super::CudaBackend;
use super::launch::attention::attention_key_ranges;
use crate::attention_cudnn::AttentionShape;
use crate::kernel_choice::describe_attention;
use crate::libraries::Library;

impl CudaBackend {
    /// Returns parity keys with the values that are in effect.
    pub(super) fn describe_effective_values(&self) -> Vec<(String, String)> {
        let mut values = vec![
            ("backend".to_string(), "cuda".to_string()),
            ("GPU".to_string(), self.describe_device()),
            ("GPU libraries".to_string(), self.describe_libraries()),
        ];
        values.extend(self.gemms.describe_routes());
        values.extend(self.describe_attention_routes());
        values
    }

    fn describe_device(&self) -> String {
        let (major, minor) = self.capabilities.compute;
        let name = self.context.device_name().unwrap_or_else(|_| "unknown".to_string());
        let gpu = format!("{name}, sm_{major}{minor}");
        // Other kernels may give other bits, so ranks with different masks must not run together.
        let mask = &self.options.masked_features;
        if mask.is_empty() { gpu } else { format!("{gpu} without {mask}") }
    }

    fn describe_libraries(&self) -> String {
        let used = self.memory_use.libraries.found.iter().filter(|f| f.library != Library::Nvml);
        let versions = used
            .map(|f| format!("{} {}", f.library.name(), f.version.as_deref().unwrap_or("without version")));
        versions.collect::<Vec<_>>().join(", ")
    }

    /// Returns the implementation of each attention, as its launch chooses it.
    fn describe_attention_routes(&self) -> BTreeMap<String, String> {
        let mut routes = BTreeMap::new();
        for p in &self.programs {
            for view in p.views.iter() {
                let OpView::Attention(v) = view else { continue };
                let ranges: Vec<AttentionShape> =
                    attention_key_ranges(&p.program, v).into_iter().map(|(shape, _)| shape).collect();
                let dtype = p.program.type_of(v.q).dtype;
                let route = describe_attention(&self.capabilities, dtype, &ranges);
                routes.insert(attention_class(&p.program, v), route);
            }
        }
        routes
    }
}

/// Names the class of an attention, such as `route: attention bf16[4680, 5120] by 4680 keys, heads of
/// 128`.
fn attention_class(p: &Program, v: &views::Attention) -> String {
    let (q, keys) = (p.type_of(v.q), p.type_of(v.k).shape[0]);
    let bias = v.bias_rows.as_ref().map_or(String::new(), |rows| format!(", bias on keys {rows:?}"));
    let (dtype, head) = (q.dtype.name(), v.head_dim);
    format!("route: attention {dtype}{:?} by {keys} keys, heads of {head}{bias}", q.shape)
}

//! Attention through cuDNN's graphs: one op, softmax(q · kᵀ · scale) · v for all heads, rows of tokens as they lie.
//!
//! A plan is made for a shape and kept; once frozen, a shape that was not seen before is refused.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendAttributeType_t as Kind, cudnnBackendDescriptor_t,
    cudnnBackendDescriptorType_t as Type, cudnnBackendHeurMode_t, cudnnDataType_t, cudnnHandle_t,
    cudnnStatus_t,
};

use crate::driver::{Done, Memory, Stream, failed};
use crate::tables::Cudnn;

/// What one attention is, in bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Shape {
    pub(crate) queries: u64,
    pub(crate) keys: u64,
    pub(crate) heads: u64,
    pub(crate) head: u64,
    /// Whether the logarithms of the sums are put out too, f32 [heads, queries].
    pub(crate) sums: bool,
}

impl Shape {
    /// Whether cuDNN is asked for it; other shapes go to a kernel of this crate.
    pub(crate) fn fits(&self) -> bool {
        self.head.is_multiple_of(8) && self.head <= 128 && self.head >= 32
    }
}

/// Where its operands lie.
#[derive(Debug, Clone, Copy)]
pub(crate) struct At {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) out: u64,
    /// 0 where the shape has none.
    pub(crate) sums: u64,
}

/// A descriptor of the library, destroyed when it goes.
#[derive(Debug)]
struct Descriptor {
    raw: cudnnBackendDescriptor_t,
    dnn: Cudnn,
}

#[derive(Debug)]
struct Plan {
    plan: Descriptor,
    workspace_bytes: usize,
    /// What the plan was made of; the library refers to it.
    _parts: Vec<Descriptor>,
}

/// Attention of one device.
#[derive(Debug)]
pub(crate) struct Attentions {
    dnn: Cudnn,
    handle: cudnnHandle_t,
    plans: BTreeMap<Shape, Plan>,
    workspace: Option<Memory>,
    frozen: bool,
}

#[allow(unsafe_code, reason = "raw handles are owned")]
// SAFETY: the library's objects are used by whoever owns this alone.
unsafe impl Send for Attentions {}

/// Names of tensors in a plan.
const IDS: [i64; 6] = [1, 2, 3, 4, 5, 6];

impl Attentions {
    pub(crate) fn new(dnn: Cudnn) -> Done<Attentions> {
        let mut handle = std::ptr::null_mut();
        check(&dnn, (dnn.create)(&mut handle), "cudnnCreate")?;
        Ok(Attentions { dnn, handle, plans: BTreeMap::new(), workspace: None, frozen: false })
    }

    /// Makes the plan of a shape.
    pub(crate) fn prepare(&mut self, shape: Shape) -> Done<()> {
        if self.plans.contains_key(&shape) {
            return Ok(());
        }
        if self.frozen {
            return failed(format!("attention of {shape:?} after warm-up"));
        }
        let plan = self.plan(shape)?;
        let need = plan.workspace_bytes;
        if need > self.workspace.as_ref().map_or(0, Memory::bytes) {
            self.workspace = Some(Memory::new(need)?);
        }
        self.plans.insert(shape, plan);
        Ok(())
    }

    /// Whether from here on no plan is made.
    pub(crate) fn freeze(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    pub(crate) fn run(&mut self, shape: Shape, at: At, stream: &Stream) -> Done<()> {
        let Some(plan) = self.plans.get(&shape) else {
            return failed(format!("no plan was made for attention of {shape:?}"));
        };
        check(&self.dnn, (self.dnn.set_stream)(self.handle, stream.raw().cast()), "cudnnSetStream")?;
        let scale = 1.0 / (shape.head as f32).sqrt();
        let count = if shape.sums { 6 } else { 5 };
        let pointers: [*const c_void; 6] = [
            at.q as *const c_void,
            at.k as *const c_void,
            at.v as *const c_void,
            at.out as *const c_void,
            std::ptr::from_ref(&scale).cast(),
            at.sums as *const c_void,
        ];
        let workspace = self.workspace.as_ref().map_or(0, Memory::at) as *const c_void;
        let pack = self.descriptor(Type::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, Kind::CUDNN_TYPE_INT64, &IDS[..count])?;
        let (data, kind) = (Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, Kind::CUDNN_TYPE_VOID_PTR);
        pack.set(data, kind, &pointers[..count])?;
        pack.set(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, kind, &[workspace])?;
        pack.finalize()?;
        check(&self.dnn, (self.dnn.execute)(self.handle, plan.plan.raw, pack.raw), "cudnnBackendExecute")
    }

    fn descriptor(&self, ty: Type) -> Done<Descriptor> {
        let mut raw = std::ptr::null_mut();
        check(&self.dnn, (self.dnn.descriptor)(ty, &mut raw), "cudnnBackendCreateDescriptor")?;
        Ok(Descriptor { raw, dnn: self.dnn })
    }

    fn tensor(
        &self,
        id: i64,
        ty: cudnnDataType_t,
        dims: [u64; 4],
        strides: [u64; 4],
        host: bool,
    ) -> Done<Descriptor> {
        let t = self.descriptor(Type::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        let alignment = if host { 4_i64 } else { 16 };
        t.set(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, Kind::CUDNN_TYPE_INT64, &[id])?;
        t.set(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, Kind::CUDNN_TYPE_DATA_TYPE, &[ty])?;
        t.set(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, Kind::CUDNN_TYPE_INT64, &dims)?;
        t.set(Attribute::CUDNN_ATTR_TENSOR_STRIDES, Kind::CUDNN_TYPE_INT64, &strides)?;
        t.set(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, Kind::CUDNN_TYPE_INT64, &[alignment])?;
        if host {
            t.set(Attribute::CUDNN_ATTR_TENSOR_IS_BY_VALUE, Kind::CUDNN_TYPE_BOOLEAN, &[true])?;
        }
        t.finalize()?;
        Ok(t)
    }

    fn plan(&self, s: Shape) -> Done<Plan> {
        use Kind::CUDNN_TYPE_BACKEND_DESCRIPTOR as DESCRIPTOR;
        let rows = |n: u64| ([1, s.heads, n, s.head], [n * s.heads * s.head, s.head, s.heads * s.head, 1]);
        let (half, single) = (cudnnDataType_t::CUDNN_DATA_BFLOAT16, cudnnDataType_t::CUDNN_DATA_FLOAT);
        let ((qd, qs), (kd, ks)) = (rows(s.queries), rows(s.keys));
        let mut parts = vec![
            self.tensor(IDS[0], half, qd, qs, false)?,
            self.tensor(IDS[1], half, kd, ks, false)?,
            self.tensor(IDS[2], half, kd, ks, false)?,
            self.tensor(IDS[3], half, qd, qs, false)?,
            self.tensor(IDS[4], single, [1; 4], [1; 4], true)?,
        ];
        let op = self.descriptor(Type::CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR)?;
        let names = [
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC,
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC,
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC,
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC,
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC,
        ];
        for (name, part) in names.iter().zip(&parts) {
            op.set(*name, DESCRIPTOR, &[part.raw])?;
        }
        if s.sums {
            let (dims, strides) = ([1, s.heads, s.queries, 1], [s.heads * s.queries, s.queries, 1, 1]);
            let sums = self.tensor(IDS[5], single, dims, strides, false)?;
            op.set(Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC, DESCRIPTOR, &[sums.raw])?;
            parts.push(sums);
        }
        op.finalize()?;
        let graph = self.descriptor(Type::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        graph.set(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[self.handle])?;
        graph.set(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, DESCRIPTOR, &[op.raw])?;
        graph.finalize()?;
        let ask = self.descriptor(Type::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        ask.set(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, DESCRIPTOR, &[graph.raw])?;
        let mode = cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A;
        ask.set(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, Kind::CUDNN_TYPE_HEUR_MODE, &[mode])?;
        ask.finalize()?;
        let configs = (0..8)
            .map(|_| self.descriptor(Type::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR))
            .collect::<Done<Vec<Descriptor>>>()?;
        let mut raws: Vec<cudnnBackendDescriptor_t> = configs.iter().map(|c| c.raw).collect();
        let found = ask.get(Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS, DESCRIPTOR, &mut raws)?;
        for config in configs.into_iter().take(found) {
            let plan = self.descriptor(Type::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
            plan.set(Attribute::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, Kind::CUDNN_TYPE_HANDLE, &[self.handle])?;
            plan.set(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, DESCRIPTOR, &[config.raw])?;
            if plan.finalize().is_err() {
                continue;
            }
            let mut bytes = [0_i64];
            plan.get(
                Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                Kind::CUDNN_TYPE_INT64,
                &mut bytes,
            )?;
            parts.extend([op, graph, ask, config]);
            return Ok(Plan { plan, workspace_bytes: bytes[0].max(0) as usize, _parts: parts });
        }
        failed(format!("cuDNN has no plan for attention of {s:?}; its last words: {}", last_words(&self.dnn)))
    }
}

impl Drop for Attentions {
    fn drop(&mut self) {
        self.plans.clear();
        (self.dnn.destroy)(self.handle);
    }
}

impl Descriptor {
    fn set<T>(&self, name: Attribute, kind: Kind, values: &[T]) -> Done<()> {
        let status = (self.dnn.set)(self.raw, name, kind, values.len() as i64, values.as_ptr().cast());
        check(&self.dnn, status, &format!("{name:?}"))
    }

    /// How many there are.
    fn get<T>(&self, name: Attribute, kind: Kind, values: &mut [T]) -> Done<usize> {
        let (room, mut count) = (values.len() as i64, 0);
        let status = (self.dnn.get)(self.raw, name, kind, room, &mut count, values.as_mut_ptr().cast());
        check(&self.dnn, status, &format!("{name:?}"))?;
        Ok(usize::try_from(count).unwrap_or(0).min(values.len()))
    }

    fn finalize(&self) -> Done<()> {
        check(&self.dnn, (self.dnn.finalize)(self.raw), "cudnnBackendFinalize")
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        (self.dnn.drop)(self.raw);
    }
}

fn last_words(dnn: &Cudnn) -> String {
    let mut text = [0_u8; 512];
    (dnn.last_error)(text.as_mut_ptr().cast::<c_char>(), text.len());
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    String::from_utf8_lossy(&text[..end]).into_owned()
}

fn check(dnn: &Cudnn, status: cudnnStatus_t, call: &str) -> Done<()> {
    match status {
        cudnnStatus_t::CUDNN_STATUS_SUCCESS => Ok(()),
        other => failed(format!("{call}: {other:?}: {}", last_words(dnn))),
    }
}

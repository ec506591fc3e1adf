//! Attention through the cuDNN graph API: softmax(q · kᵀ · scale) · v for all heads, as one
//! operation on token-major rows.
//!
//! A cuDNN plan is built once per shape and cached. Once frozen, [`CudnnAttention`] refuses new
//! shapes.

#![allow(unsafe_code, reason = "cuDNN's own functions")]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t as Attribute, cudnnBackendAttributeType_t as Kind, cudnnBackendDescriptor_t,
    cudnnBackendDescriptorType_t as Type, cudnnBackendHeurMode_t, cudnnDataType_t, cudnnHandle_t,
    cudnnStatus_t,
};

use crate::device_memory::DeviceMemory;
use crate::driver::{CudaResult, CudaStream, cuda_failure};
use crate::dylib::Cudnn;

/// Number of query rows, key rows and heads of one attention in bf16, and elements per head. Plans
/// are cached by shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct AttentionShape {
    pub(crate) queries: u64,
    pub(crate) keys: u64,
    pub(crate) heads: u64,
    pub(crate) head_size: u64,
    /// Whether the log-sum-exps are stored too, as f32 [heads, queries].
    pub(crate) stores_lse: bool,
}

impl AttentionShape {
    /// Returns whether cuDNN supports the shape; other shapes use a kernel of this crate.
    pub(crate) fn is_supported_by_cudnn(&self) -> bool {
        self.head_size.is_multiple_of(8) && self.head_size <= 128 && self.head_size >= 32
    }
}

/// Device addresses of the operands and the results of one attention.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionOperands {
    pub(crate) q: u64,
    pub(crate) k: u64,
    pub(crate) v: u64,
    pub(crate) out: u64,
    /// Address of the log-sum-exps; 0 if the shape has none.
    pub(crate) lse: u64,
}

/// A cuDNN backend descriptor, destroyed on drop.
#[derive(Debug)]
struct CudnnDescriptor {
    raw: cudnnBackendDescriptor_t,
    dnn: Cudnn,
}

#[derive(Debug)]
struct CudnnPlan {
    plan: CudnnDescriptor,
    workspace_bytes: usize,
    /// The descriptors that the plan was built from and refers to.
    _descriptors: Vec<CudnnDescriptor>,
}

/// The cuDNN attention plans of one device, one per shape, and the workspace that all of them
/// share.
#[derive(Debug)]
pub(crate) struct CudnnAttention {
    dnn: Cudnn,
    handle: cudnnHandle_t,
    plans: BTreeMap<AttentionShape, CudnnPlan>,
    workspace: Option<DeviceMemory>,
    frozen: bool,
}

// SAFETY: only the owner of this value uses the library's objects.
unsafe impl Send for CudnnAttention {}

/// Unique ids of q, k, v, the result, the scale, and the log-sum-exps if they are stored.
const TENSOR_IDS: [i64; 6] = [1, 2, 3, 4, 5, 6];

impl CudnnAttention {
    pub(crate) fn new(dnn: Cudnn) -> CudaResult<CudnnAttention> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: cuDNN writes the handle to this stack frame.
        check_status(&dnn, unsafe { (dnn.create)(&mut handle) }, "cudnnCreate")?;
        Ok(CudnnAttention { dnn, handle, plans: BTreeMap::new(), workspace: None, frozen: false })
    }

    /// Builds the plan of a shape unless it is cached.
    pub(crate) fn prepare_plan(&mut self, shape: AttentionShape) -> CudaResult<()> {
        if self.plans.contains_key(&shape) {
            return Ok(());
        }
        if self.frozen {
            return cuda_failure(format!("attention with the new shape {shape:?} after warm-up"));
        }
        let plan = self.build_plan(shape)?;
        let need = plan.workspace_bytes;
        if need > self.workspace.as_ref().map_or(0, DeviceMemory::byte_len) {
            self.workspace = Some(DeviceMemory::new(need)?);
        }
        self.plans.insert(shape, plan);
        Ok(())
    }

    /// Sets whether `prepare_plan` refuses shapes without a plan, as it does after warm-up.
    pub(crate) fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
    }

    /// Enqueues attention with a plan that [`prepare_plan`](CudnnAttention::prepare_plan) built.
    ///
    /// # Safety
    /// Every operand must be an allocation of the shape's extent on this device, must stay allocated
    /// until the stream has completed the work, and no other stream may write it meanwhile. One
    /// stream at a time may use this value, because its plans share a workspace.
    pub(crate) unsafe fn run_plan(
        &mut self,
        shape: AttentionShape,
        operands: AttentionOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let Some(plan) = self.plans.get(&shape) else {
            return cuda_failure(format!("no cuDNN plan was built for attention with {shape:?}"));
        };
        // SAFETY: the handle and the stream are alive.
        let set = unsafe { (self.dnn.set_stream)(self.handle, stream.as_raw().cast()) };
        check_status(&self.dnn, set, "cudnnSetStream")?;
        let scale = 1.0 / (shape.head_size as f32).sqrt();
        let count = if shape.stores_lse { 6 } else { 5 };
        let pointers: [*const c_void; 6] = [
            operands.q as *const c_void,
            operands.k as *const c_void,
            operands.v as *const c_void,
            operands.out as *const c_void,
            std::ptr::from_ref(&scale).cast(),
            operands.lse as *const c_void,
        ];
        let workspace = self.workspace.as_ref().map_or(0, DeviceMemory::device_address) as *const c_void;
        let variant_pack = self.create_descriptor(Type::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?;
        variant_pack.set_attribute(Attribute::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &TENSOR_IDS[..count])?;
        let data = Attribute::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS;
        variant_pack.set_attribute(data, &pointers[..count])?;
        variant_pack.set_attribute(Attribute::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, &[workspace])?;
        variant_pack.finalize()?;
        // SAFETY: handle, plan and variant pack are alive. The pack names the operands, which the
        // caller guarantees, the workspace, which is as large as the largest plan needs, and the
        // scale, which cuDNN reads during this call.
        let executed = unsafe { (self.dnn.execute)(self.handle, plan.plan.raw, variant_pack.raw) };
        check_status(&self.dnn, executed, "cudnnBackendExecute")
    }

    fn create_descriptor(&self, ty: Type) -> CudaResult<CudnnDescriptor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: cuDNN writes the descriptor to this stack frame.
        let created = unsafe { (self.dnn.descriptor)(ty, &mut raw) };
        check_status(&self.dnn, created, "cudnnBackendCreateDescriptor")?;
        Ok(CudnnDescriptor { raw, dnn: self.dnn })
    }

    fn create_tensor(
        &self,
        id: i64,
        ty: cudnnDataType_t,
        dims: [u64; 4],
        strides: [u64; 4],
        host: bool,
    ) -> CudaResult<CudnnDescriptor> {
        let t = self.create_descriptor(Type::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        let alignment = if host { 4_i64 } else { 16 };
        t.set_attribute(Attribute::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id])?;
        t.set_attribute(Attribute::CUDNN_ATTR_TENSOR_DATA_TYPE, &[ty])?;
        t.set_attribute(Attribute::CUDNN_ATTR_TENSOR_DIMENSIONS, &dims)?;
        t.set_attribute(Attribute::CUDNN_ATTR_TENSOR_STRIDES, &strides)?;
        t.set_attribute(Attribute::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[alignment])?;
        if host {
            t.set_attribute(Attribute::CUDNN_ATTR_TENSOR_IS_BY_VALUE, &[true])?;
        }
        t.finalize()?;
        Ok(t)
    }

    fn build_plan(&self, s: AttentionShape) -> CudaResult<CudnnPlan> {
        let rows = |n: u64| {
            ([1, s.heads, n, s.head_size], [n * s.heads * s.head_size, s.head_size, s.heads * s.head_size, 1])
        };
        let (bf16, f32_type) = (cudnnDataType_t::CUDNN_DATA_BFLOAT16, cudnnDataType_t::CUDNN_DATA_FLOAT);
        let ((qd, qs), (kd, ks)) = (rows(s.queries), rows(s.keys));
        let mut descriptors = vec![
            self.create_tensor(TENSOR_IDS[0], bf16, qd, qs, false)?,
            self.create_tensor(TENSOR_IDS[1], bf16, kd, ks, false)?,
            self.create_tensor(TENSOR_IDS[2], bf16, kd, ks, false)?,
            self.create_tensor(TENSOR_IDS[3], bf16, qd, qs, false)?,
            self.create_tensor(TENSOR_IDS[4], f32_type, [1; 4], [1; 4], true)?,
        ];
        let op = self.create_descriptor(Type::CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR)?;
        let attributes = [
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC,
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC,
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC,
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC,
            Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC,
        ];
        for (name, part) in attributes.iter().zip(&descriptors) {
            op.set_attribute(*name, &[part.raw])?;
        }
        if s.stores_lse {
            let (dims, strides) = ([1, s.heads, s.queries, 1], [s.heads * s.queries, s.queries, 1, 1]);
            let sums = self.create_tensor(TENSOR_IDS[5], f32_type, dims, strides, false)?;
            op.set_attribute(Attribute::CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC, &[sums.raw])?;
            descriptors.push(sums);
        }
        op.finalize()?;
        let graph = self.create_descriptor(Type::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        graph.set_attribute(Attribute::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, &[self.handle])?;
        graph.set_attribute(Attribute::CUDNN_ATTR_OPERATIONGRAPH_OPS, &[op.raw])?;
        graph.finalize()?;
        let heuristic = self.create_descriptor(Type::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?;
        heuristic.set_attribute(Attribute::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[graph.raw])?;
        let mode = cudnnBackendHeurMode_t::CUDNN_HEUR_MODE_A;
        heuristic.set_attribute(Attribute::CUDNN_ATTR_ENGINEHEUR_MODE, &[mode])?;
        heuristic.finalize()?;
        let configs = (0..8)
            .map(|_| self.create_descriptor(Type::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR))
            .collect::<CudaResult<Vec<CudnnDescriptor>>>()?;
        let mut raws: Vec<cudnnBackendDescriptor_t> = configs.iter().map(|c| c.raw).collect();
        let found = heuristic.get_attribute(Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS, &mut raws)?;
        for config in configs.into_iter().take(found) {
            let plan = self.create_descriptor(Type::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
            plan.set_attribute(Attribute::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, &[self.handle])?;
            plan.set_attribute(Attribute::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[config.raw])?;
            if plan.finalize().is_err() {
                continue;
            }
            let mut bytes = [0_i64];
            plan.get_attribute(Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, &mut bytes)?;
            descriptors.extend([op, graph, heuristic, config]);
            return Ok(CudnnPlan {
                plan,
                workspace_bytes: bytes[0].max(0) as usize,
                _descriptors: descriptors,
            });
        }
        cuda_failure(format!(
            "cuDNN has no plan for attention with {s:?}; its last error: {}",
            last_error(&self.dnn)
        ))
    }
}

impl Drop for CudnnAttention {
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: `new` created the handle, and the plans that refer to it are gone.
        unsafe { (self.dnn.destroy)(self.handle) };
    }
}

/// An element of an attribute's value, with the kind under which cuDNN reads this type.
trait AttributeElement {
    const KIND: Kind;
}

macro_rules! attribute_kinds {
    ($($ty:ty = $kind:ident,)*) => {
        $(impl AttributeElement for $ty {
            const KIND: Kind = Kind::$kind;
        })*
    };
}

// cuDNN accepts dims and strides as unsigned words too: they have the same bits. A descriptor is an
// untyped address.
attribute_kinds! {
    i64 = CUDNN_TYPE_INT64,
    u64 = CUDNN_TYPE_INT64,
    bool = CUDNN_TYPE_BOOLEAN,
    cudnnDataType_t = CUDNN_TYPE_DATA_TYPE,
    cudnnBackendHeurMode_t = CUDNN_TYPE_HEUR_MODE,
    *const c_void = CUDNN_TYPE_VOID_PTR,
    *mut c_void = CUDNN_TYPE_BACKEND_DESCRIPTOR,
    cudnnHandle_t = CUDNN_TYPE_HANDLE,
}

impl CudnnDescriptor {
    /// Sets an attribute; cuDNN copies the values.
    fn set_attribute<T: AttributeElement>(&self, name: Attribute, values: &[T]) -> CudaResult<()> {
        // SAFETY: the descriptor is alive, and cuDNN reads this many elements of the kind, which
        // `AttributeElement` gives for this type.
        let status =
            unsafe { (self.dnn.set)(self.raw, name, T::KIND, values.len() as i64, values.as_ptr().cast()) };
        check_status(&self.dnn, status, &format!("{name:?}"))
    }

    /// Reads values and returns how many there are.
    fn get_attribute<T: AttributeElement>(&self, name: Attribute, values: &mut [T]) -> CudaResult<usize> {
        let (capacity, mut count) = (values.len() as i64, 0);
        // SAFETY: the descriptor is alive, and cuDNN writes at most this many elements of the kind,
        // which `AttributeElement` gives for this type. If they are descriptors, it writes to the
        // objects behind them, which are alive.
        let status = unsafe {
            (self.dnn.get)(self.raw, name, T::KIND, capacity, &mut count, values.as_mut_ptr().cast())
        };
        check_status(&self.dnn, status, &format!("{name:?}"))?;
        Ok(usize::try_from(count).unwrap_or(0).min(values.len()))
    }

    fn finalize(&self) -> CudaResult<()> {
        // SAFETY: the descriptor is alive, and so are those that it refers to.
        check_status(&self.dnn, unsafe { (self.dnn.finalize)(self.raw) }, "cudnnBackendFinalize")
    }
}

impl Drop for CudnnDescriptor {
    fn drop(&mut self) {
        // SAFETY: `create_descriptor` created it, and this is its only owner.
        unsafe { (self.dnn.drop)(self.raw) };
    }
}

fn last_error(dnn: &Cudnn) -> String {
    let mut text = [0_u8; 512];
    // SAFETY: cuDNN writes at most this many bytes, terminated by a NUL.
    unsafe { (dnn.last_error)(text.as_mut_ptr().cast::<c_char>(), text.len()) };
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    String::from_utf8_lossy(&text[..end]).into_owned()
}

fn check_status(dnn: &Cudnn, status: cudnnStatus_t, call: &str) -> CudaResult<()> {
    match status {
        cudnnStatus_t::CUDNN_STATUS_SUCCESS => Ok(()),
        other => cuda_failure(format!("{call}: {other:?}: {}", last_error(dnn))),
    }
}

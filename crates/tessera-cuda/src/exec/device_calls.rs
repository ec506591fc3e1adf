//! Runs whose inputs may lie in GPU memory and whose outputs stay there.
//!
//! A captured graph has fixed addresses. So an input is copied to its place in the call area before the
//! graph is launched, and an output from its place to new memory afterwards. Each copy reads and
//! writes its bytes once in GPU memory, and no byte passes through the host.

#![allow(unsafe_code, reason = "copies between arrays and the memory of the backend")]

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_device::{CallData, Fault, check_input};
use tessera_ir::{Op, Opcode};

use super::call_checks::find_index_input;
use super::run::first_stream_name;
use super::{CudaBackend, ValueLocation};
use crate::call_arrays::{GpuCallArrays, GpuOutput, NonFinite};
use crate::device_memory::{DeviceMemory, copy_to_device, copy_to_host};
use crate::driver::{CudaError, CudaResult, cuda_failure};
use crate::gpu_array::GpuArray;
use crate::kernel_table::{SUMMARIZE_OUTPUT, SummarizeOutput};
use crate::kernels::KernelLaunch;

/// Words in which the summary of an output counts.
const FOUND_WORDS: usize = 3;

/// Most blocks of the kernel that summarizes an output, eight for each multiprocessor of an H200, and threads of each.
const SUMMARY_GRID: (u64, u32) = (1056, 256);

impl CudaBackend {
    /// Makes runs of the programs that are loaded later read inputs from GPU memory where the caller has put
    /// them there, and leave every output there.
    pub fn set_call_arrays(&mut self, arrays: Arc<GpuCallArrays>) {
        self.call_arrays = Some(arrays);
    }

    /// Copies the inputs of a call to the call area, which no run uses.
    pub(super) fn copy_call_inputs(&mut self, program: usize, call: &CallData<'_>) -> Result<(), Fault> {
        let Some(arrays) = self.call_arrays.as_ref().map(|arrays| arrays.inputs()) else { return Ok(()) };
        // The arrays stay allocated until the run that reads them has ended.
        self.call_inputs = arrays.values().cloned().collect();
        let (p, views) = self.program_and_views(program);
        if let Some(name) = find_index_input(&p, &views, |name| arrays.contains_key(name)) {
            let what = format!("@{} uses `{name}` as indices, which the host checks", p.name);
            return Err(Fault::Failed(format!("{what}: pass it in host memory")));
        }
        for op in p.ops.iter().filter(|op| op.opcode == Opcode::Input) {
            let name = op.name.as_deref().unwrap_or_default();
            let array = arrays.get(name);
            if array.is_none() {
                check_input(&p, op, call)?;
            }
            self.copy_call_input(program, op, array, call.inputs.get(name).copied().unwrap_or_default())
                .map_err(|e| Fault::Failed(format!("input `{name}` of @{}: {e}", p.name)))?;
        }
        Ok(())
    }

    fn copy_call_input(
        &self,
        program: usize,
        op: &Op,
        array: Option<&GpuArray>,
        values: &[f32],
    ) -> CudaResult<()> {
        let own = &self.programs[program];
        let ValueLocation::CallArea(at) = own.locations[op.results[0].0 as usize] else { return Ok(()) };
        let count = own.program.type_of(op.results[0]).element_count() as usize;
        let to = own.call_area.slice::<f32>(at, count)?;
        let Some(array) = array else { return copy_to_device(to, values) };
        if (array.device(), array.len()) != (self.options.device_index, count) {
            let here = self.options.device_index;
            return cuda_failure(format!(
                "{} elements on device {}, where the program reads {count} on device {here}",
                array.len(),
                array.device()
            ));
        }
        let main = self.main_stream(&own.program)?;
        array.delay(main)?;
        // SAFETY: both ranges have these bytes. The backend keeps the array and the call area until the run
        // has ended; no earlier run is unfinished, and nobody writes the array.
        unsafe { main.copy_async(to.address(), array.address(), array.byte_len()) }
    }

    /// Copies the outputs of a completed run to memory of their own.
    pub(super) fn keep_call_outputs(&mut self, program: usize) -> CudaResult<()> {
        self.call_inputs.clear();
        let Some(arrays) = self.call_arrays.clone() else { return Ok(()) };
        let prefix = format!("{program}/");
        let outputs = self.outputs.iter().filter_map(|(name, output)| {
            Some((name.strip_prefix(&prefix)?.to_string(), output.offset, output.len))
        });
        let outputs: Vec<(String, usize, usize)> = outputs.collect();
        let mut kept = BTreeMap::new();
        for (name, offset, len) in outputs {
            kept.insert(name, self.keep_call_output(program, offset as u64, len)?);
        }
        arrays.set_outputs(kept);
        Ok(())
    }

    fn keep_call_output(&mut self, program: usize, offset: u64, len: usize) -> CudaResult<GpuOutput> {
        let memory = DeviceMemory::new(len * size_of::<f32>())?;
        let own = &self.programs[program];
        let Some(area) = &own.device_outputs else {
            return cuda_failure("the program was loaded without memory for its outputs");
        };
        let from = area.slice::<f32>(offset, len)?;
        let found = area.slice::<u64>(own.device_output_bytes as u64, FOUND_WORDS)?;
        let name = first_stream_name(&own.program);
        let main = self.streams.get(name).ok_or_else(|| CudaError(format!("no stream {name}")))?;
        // SAFETY: both ranges have these bytes and are alive until the stream has completed the copy, which
        // this function waits for. The run that writes the outputs has completed.
        unsafe { main.copy_async(memory.device_address(), from.address(), len * size_of::<f32>()) }?;
        // SAFETY: the words lie behind the outputs, where no other work is.
        unsafe { main.zero_async(found.address(), FOUND_WORDS * size_of::<u64>()) }?;
        let args = SummarizeOutput {
            x: memory.device_address().into(),
            found: found.address().into(),
            n: len as i64,
        };
        let (most_blocks, threads) = SUMMARY_GRID;
        let blocks = (len as u64).div_ceil(u64::from(threads)).min(most_blocks);
        let launch = KernelLaunch::blocks(SUMMARIZE_OUTPUT, (blocks, threads, 0), args);
        // SAFETY: the memory has `len` elements and `found` its words; this function waits for the launch.
        unsafe { self.kernels.launch(&launch, main) }?;
        main.spin_until_done(&self.done_event)?;
        let mut words = [0_u64; FOUND_WORDS];
        copy_to_host(&mut words, found)?;
        let nonfinite = match words {
            [0, ..] => None,
            [count, behind, _] => {
                let first = len as u64 - behind;
                let mut value = [0.0_f32];
                copy_to_host(&mut value, memory.slice(first * 4, 1)?)?;
                Some(NonFinite { count, first, value: value[0] })
            }
        };
        let device = self.options.device_index;
        let array = GpuArray::from_memory(Arc::clone(&self.context), device, memory, len);
        Ok(GpuOutput { array, nonfinite, digest: words[2] })
    }
}

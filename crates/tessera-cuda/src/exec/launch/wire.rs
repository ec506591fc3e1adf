//! The launches around an exchange that sends e4m3.

use tessera_ir::WIRE_BLOCK;

use super::site::{LaunchSite, last_extent};
use crate::driver::{CudaError, CudaResult};
use crate::kernel_table::{DECODE_ROWS, DecodeRows, ENCODE_ROWS, EncodeRows};
use crate::kernels::KernelLaunch;

/// Threads of a warp, which encodes a block.
const WARP: u64 = 32;

/// Builds the launch that encodes the operand of an exchange as words, and the one that decodes the words of the result.
pub(in crate::exec) fn build_wire_launches(s: &LaunchSite<'_>, op: usize) -> CudaResult<[KernelLaunch; 2]> {
    let exchange = &s.p.ops[op];
    let missing = || CudaError(format!("{} without operand or result", exchange.opcode.name()));
    let (x, out) =
        exchange.operands.first().copied().zip(s.p.collective_result(exchange)).ok_or_else(missing)?;
    let [sent, received] = s.wire_addresses(op)?;
    let width = last_extent(s.p.type_of(x));
    let rows_of = |v| s.p.type_of(v).element_count() / width.max(1);
    let blocks = rows_of(x) * width.div_ceil(WIRE_BLOCK as u64);
    let words = rows_of(out) * width.div_ceil(4);
    let encode = EncodeRows { x: s.at(x)?, words: sent.into(), width: width as i32, blocks: blocks as i64 };
    let decode = DecodeRows { words: received.into(), out: s.at(out)?, width: width as i32, n: words as i64 };
    Ok([
        KernelLaunch::elements(ENCODE_ROWS, WARP * blocks, encode),
        KernelLaunch::elements(DECODE_ROWS, words, decode),
    ])
}

//! Rules of the ops that attention and routing are written out with: softmax, dot and the fused route to experts.
//!
//! `reduce_scatter → softmax → dot → all_gather` is right for some cuts and runs without an error for all of
//! them, so each refusal here says what the ranks would have computed.

use tessera_mesh::{Axis, AxisLayout, Shard};

use super::{Cx, Rule, T0203, T0210, T0213, T0214, T0215, refuse};
use crate::{Attr, Attrs, Dialect, Type};

/// Experts of a token where `top_k` is absent.
const TOP_K: u64 = 2;

impl Cx<'_> {
    pub(super) fn softmax(&self) -> Rule<Type> {
        let Some(last) = self.x[0].shape.len().checked_sub(1) else {
            return refuse(&T0210, format!("softmax of the scalar {}", self.show(0)));
        };
        let dim = if self.op.attrs.contains_key("dim") { self.tensor_dim("dim")? } else { last };
        match self.shards_dim(&self.x[0].layout, dim) {
            None => Ok(self.x[0].clone()),
            Some(axis) => refuse(
                &T0213,
                format!(
                    "softmax over dim {dim}, which is sharded over {axis}: each rank would normalise its own piece"
                ),
            ),
        }
    }

    pub(super) fn dot(&self) -> Rule<Type> {
        let rank = self.x[0].shape.len();
        if rank < 2 || self.x[1].shape.len() != rank {
            return refuse(
                &T0210,
                format!(
                    "x {} · y {}: two matrices, or stacks of them with equal batch dims",
                    self.show(0),
                    self.show(1)
                ),
            );
        }
        let transposed = flag(&self.op.attrs, "transposed")?;
        if self.op.attrs.contains_key("scale") && !self.op.float("scale").is_some_and(f64::is_finite) {
            return refuse(&T0215, "`scale` must be a number");
        }
        self.same_dtype(0, 1)?;
        let (rows, inner) = (rank - 2, rank - 1);
        let (y_inner, y_columns) = if transposed { (inner, rows) } else { (rows, inner) };
        // Whole extents, so that pieces cut differently are refused for their layouts and not for their lengths.
        let whole = |i: usize| self.x[i].layout.global(&self.x[i].shape, self.mesh);
        let (x, y) = (whole(0), whole(1));
        if x[..rows] != y[..rows] {
            return refuse(&T0210, format!("batch dims differ: x {} · y {}", self.show(0), self.show(1)));
        }
        if x[inner] != y[y_inner] {
            return refuse(&T0210, format!("inner extents differ: x {} · y {}", self.show(0), self.show(1)));
        }
        let cut = DotDims { rows, inner, y_inner, y_columns };
        let mut shape = self.x[0].shape.clone();
        shape[inner] = self.x[1].shape[y_columns];
        let mut out = self.typed(shape, tessera_mesh::Layout::REPLICATED);
        for axis in self.mesh.axes() {
            let (x, y) = (self.x[0].layout.on(axis), self.x[1].layout.on(axis));
            match self.dot_layout(cut, x, y) {
                Ok(on) => out = out.on(axis, on),
                Err(why) => {
                    return refuse(&T0214, format!("dot of x {x} and y {y} on {axis}: {why}"));
                }
            }
        }
        Ok(out)
    }

    /// The layout of a dot's result on one axis, or what is wrong.
    fn dot_layout(&self, cut: DotDims, x: AxisLayout, y: AxisLayout) -> Result<AxisLayout, String> {
        use AxisLayout::{Replicated as R, Shard as S};
        let DotDims { rows, inner, y_inner, y_columns } = cut;
        match (x, y) {
            (R, R) => Ok(R),
            (S(a), S(b)) if a == b && a.dim < rows => Ok(x),
            (S(a), R) if a.dim == rows => Ok(x),
            (R, S(b)) if b.dim == y_columns => Ok(S(Shard { dim: inner, ..b })),
            (S(a), S(b)) if a.dim == inner && b == (Shard { dim: y_inner, ..a }) => {
                self.partial_of(a).ok_or_else(|| "its terms have no sum".to_string())
            }
            (S(a), S(b)) if a.dim == rows && b.dim == y_columns => Err(format!(
                "rows of x (dim {rows}) by columns of y (dim {y_columns}): each rank would compute only its diagonal \
block"
            )),
            (S(a), _) if a.dim == inner => Err(format!(
                "x is cut along the contraction (dim {inner}), y is not cut alike (dim {y_inner})"
            )),
            (_, S(b)) if b.dim == y_inner => Err(format!(
                "y is cut along the contraction (dim {y_inner}), x is not cut alike (dim {inner})"
            )),
            (S(a), _) if a.dim < rows => Err(format!(
                "x is cut over batch dim {} and y is not cut alike: a rank would pair batches that do not belong \
together",
                a.dim
            )),
            (_, S(b)) if b.dim < rows => Err(format!(
                "y is cut over batch dim {} and x is not cut alike: a rank would pair batches that do not belong \
together",
                b.dim
            )),
            _ => Err("no rule covers this pair; gather one of them first".to_string()),
        }
    }

    pub(super) fn moe_route(&self) -> Rule<Type> {
        if self.program.dialect == Dialect::Role {
            return refuse(
                &T0203,
                "is a logical op: the program of a role packs, calls all_to_all and unpacks by itself",
            );
        }
        let ([tokens, d], [g_tokens, experts]) = (self.matrix(0)?, self.matrix(1)?);
        let bank = self.buffer()?;
        let fits = |s: &[u64]| s.len() == 3 && s[0] == experts && s[2] == d;
        if g_tokens != tokens || !fits(&bank.shape) || bank.dtype != self.x[0].dtype {
            return refuse(
                &T0210,
                format!(
                    "x {} with weights {} and experts {}: [tokens, d], [tokens, experts] and [experts, d_out, d]",
                    self.show(0),
                    self.show(1),
                    bank.display(self.mesh)
                ),
            );
        }
        moe_constants(&self.op.attrs, Some(experts))?;
        Ok(self.typed([tokens, bank.shape[1]], tessera_mesh::Layout::REPLICATED))
    }
}

/// Which dims of a dot's operands are what; x and its result share rows.
#[derive(Clone, Copy)]
struct DotDims {
    rows: usize,
    inner: usize,
    y_inner: usize,
    y_columns: usize,
}

/// The constants of `moe_route`; the number of experts where it is known.
pub(crate) fn moe_constants(attrs: &Attrs, experts: Option<u64>) -> Rule<()> {
    match attrs.get("a2a_axis") {
        Some(Attr::Str(a)) if a.parse::<Axis>().is_ok() => {}
        Some(Attr::Str(a)) => {
            let axes: Vec<&str> = Axis::ALL.iter().map(|a| a.name()).collect();
            return refuse(
                &T0215,
                format!("`a2a_axis` is \"{a}\", which is no mesh axis: {}", tessera_base::choices(&axes)),
            );
        }
        _ => return refuse(&T0215, "`a2a_axis` must name the mesh axis that tokens travel over"),
    }
    let capacity = match attrs.get("capacity_factor") {
        Some(Attr::Float(x)) => *x,
        Some(Attr::Int(i)) => *i as f64,
        _ => f64::NAN,
    };
    if !(capacity.is_finite() && capacity > 0.0) {
        return refuse(
            &T0215,
            "`capacity_factor` must be a number above 0: an expert would take no token and all would be dropped",
        );
    }
    let top_k = match attrs.get("top_k") {
        None => Some(TOP_K),
        Some(Attr::Int(k)) => u64::try_from(*k).ok(),
        Some(_) => None,
    };
    let most = experts.unwrap_or(u64::MAX);
    if !top_k.is_some_and(|k| (1..=most).contains(&k)) {
        let most = experts.map_or("the number of experts".to_string(), |n| n.to_string());
        let absent = if attrs.contains_key("top_k") { "" } else { ", is 2 where absent" };
        return refuse(
            &T0215,
            format!("`top_k` must be a whole number from 1 to {most}, the experts of a token{absent}"),
        );
    }
    flag(attrs, "pack_fused")?;
    match attrs.get("policy") {
        None => {}
        Some(Attr::Str(p)) if !p.is_empty() => {}
        Some(_) => return refuse(&T0215, "`policy` must be the name of a numerics policy"),
    }
    if flag(attrs, "quantize_fp8")? && !attrs.contains_key("policy") {
        return refuse(
            &T0215,
            "`quantize_fp8 = true` needs `policy`: sending tokens in 8 bits changes numbers, so a numerics policy \
must allow it by name",
        );
    }
    Ok(())
}

/// A flag, false where absent.
fn flag(attrs: &Attrs, name: &str) -> Rule<bool> {
    match attrs.get(name) {
        None => Ok(false),
        Some(Attr::Bool(b)) => Ok(*b),
        Some(_) => refuse(&T0215, format!("`{name}` must be true or false")),
    }
}

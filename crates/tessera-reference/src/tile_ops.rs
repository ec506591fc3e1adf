//! Reference semantics of softmax, batched matmul and mixture-of-experts routing.

use tessera_ir::views;

use crate::Tensor;
use crate::tensor::TensorResult;

/// Computes softmax along a dim.
pub(crate) fn softmax(v: &views::Softmax, x: &Tensor) -> TensorResult {
    let shape = x.shape();
    let dim = match v.dim {
        None => shape.len().checked_sub(1),
        Some(dim) => Some(dim).filter(|d| *d < shape.len()),
    };
    let dim = dim.ok_or_else(|| format!("`dim` is not a dim of {shape:?}"))?;
    let inner: usize = shape[dim + 1..].iter().product();
    let mut y = x.clone();
    for i in 0..y.data().len() {
        // Each line along the dim is processed at its first element.
        if !(i / inner).is_multiple_of(shape[dim]) {
            continue;
        }
        let line: Vec<f64> = (0..shape[dim]).map(|j| x.data()[i + j * inner]).collect();
        let top = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = line.iter().map(|v| (v - top).exp()).sum();
        for (j, v) in line.iter().enumerate() {
            y.data_mut()[i + j * inner] = (v - top).exp() / total;
        }
    }
    Ok(y)
}

/// Computes scale · x · y per batch, or scale · x · yᵀ with the attribute `transposed`.
pub(crate) fn batched_matmul(v: &views::Bmm, x: &Tensor, y: &Tensor) -> TensorResult {
    let differ = || format!("shapes do not match: x {:?}, y {:?}", x.shape(), y.shape());
    let &views::Bmm { transposed, scale, .. } = v;
    let ([batch @ .., n, k], [batch_y @ .., a, b]) = (x.shape(), y.shape()) else { return Err(differ()) };
    let (k2, m) = if transposed { (*b, *a) } else { (*a, *b) };
    if batch != batch_y || *k != k2 {
        return Err(differ());
    }
    let (n, k) = (*n, *k);
    let shape: Vec<usize> = batch.iter().copied().chain([n, m]).collect();
    Ok(Tensor::from_fn(&shape, |i| {
        let (of, row, column) = (i / (n * m), i / m % n, i % m);
        let sum: f64 = (0..k)
            .map(|j| {
                let at = if transposed { column * k + j } else { j * m + column };
                x.data()[(of * n + row) * k + j] * y.data()[of * k * m + at]
            })
            .sum();
        scale * sum
    }))
}

/// Computes Σ g · (x · Wᵉᵀ) over the experts e of each token.
pub(crate) fn moe_route(v: &views::MoeRoute, x: &Tensor, g: &Tensor, experts: &Tensor) -> TensorResult {
    let differ = || {
        format!(
            "shapes do not match: x {:?}, weights {:?}, experts {:?}",
            x.shape(),
            g.shape(),
            experts.shape()
        )
    };
    if v.quantize_fp8 {
        return Err("quantize_fp8 has no meaning in f64: its result depends on the backend".to_string());
    }
    let ([tokens, d], [n, d_out, d2]) = (x.shape(), experts.shape()) else { return Err(differ()) };
    if g.shape() != [*tokens, *n] || d != d2 {
        return Err(differ());
    }
    let (tokens, d, n, d_out) = (*tokens, *d, *n, *d_out);
    let (top_k, factor) = (v.top_k as usize, v.capacity_factor);
    if top_k > n {
        return Err(format!("invalid routing: top_k {top_k} of {n} experts, capacity_factor {factor}"));
    }
    // An expert receives a token at most once, so no expert needs more rows than there are tokens.
    let group = tokens.div_ceil(v.token_groups as usize).max(1);
    let capacity = ((factor * (group * top_k) as f64 / n as f64).ceil() as usize).min(group);
    let routes = assign_tokens(g, top_k, capacity, group);
    let capacity = capacity * v.token_groups as usize;
    let apply_expert = |row: &[f64], e: usize, o: usize| -> f64 {
        row.iter().zip(&experts.data()[(e * d_out + o) * d..][..d]).map(|(a, b)| a * b).sum()
    };
    let mut y = Tensor::full(&[tokens, d_out], 0.0);
    let mut add = |r: &Route, o: usize, value: f64| {
        y.data_mut()[r.token * d_out + o] += g.row(r.token)[r.expert] * value;
    };
    let outputs = |r: &Route| (0..d_out).map(|o| (*r, o)).collect::<Vec<_>>();
    if v.pack_fused {
        for (r, o) in routes.iter().flat_map(outputs) {
            add(&r, o, apply_expert(x.row(r.token), r.expert, o));
        }
        return Ok(y);
    }
    // Unfused: pack the rows of every expert, multiply whole experts, and combine.
    let mut packed = vec![0.0; n * capacity * d];
    for r in &routes {
        packed[(r.expert * capacity + r.row) * d..][..d].copy_from_slice(x.row(r.token));
    }
    let multiplied: Vec<f64> = (0..n * capacity * d_out)
        .map(|i| {
            let (row, o) = (i / d_out, i % d_out);
            apply_expert(&packed[row * d..][..d], row / capacity, o)
        })
        .collect();
    for (r, o) in routes.iter().flat_map(outputs) {
        add(&r, o, multiplied[(r.expert * capacity + r.row) * d_out + o]);
    }
    Ok(y)
}

/// A token that an expert accepts, in the given row of the expert's input.
#[derive(Clone, Copy)]
struct Route {
    token: usize,
    expert: usize,
    row: usize,
}

/// Assigns each token to the `top_k` experts with the largest weights in `g`, `[tokens, experts]`.
/// An expert drops the tokens of each group beyond its capacity.
fn assign_tokens(g: &Tensor, top_k: usize, capacity: usize, group: usize) -> Vec<Route> {
    let (tokens, n) = (g.shape()[0], g.shape()[1]);
    let mut load = vec![0usize; n];
    let mut routes = Vec::new();
    for token in 0..tokens {
        if token.is_multiple_of(group) {
            load.fill(0);
        }
        let mut order: Vec<usize> = (0..n).collect();
        // The sort is stable: of equal weights the lower expert comes first.
        order.sort_by(|a, b| g.row(token)[*b].total_cmp(&g.row(token)[*a]));
        for expert in order.into_iter().take(top_k) {
            if load[expert] < capacity {
                routes.push(Route { token, expert, row: token / group * capacity + load[expert] });
                load[expert] += 1;
            }
        }
    }
    routes
}

#[cfg(test)]
mod tests {
    use crate::{CallInputs, Evaluator, Tensor};
    use std::collections::BTreeMap;

    fn run(body: &str, inputs: &[(&str, Tensor)]) -> BTreeMap<String, Tensor> {
        let program = tessera_ir::parse(&format!("program @p {{ {body} }}"), "t").expect("well formed");
        let call = inputs.iter().fold(CallInputs::default(), |c, (n, t)| c.with_input(n, t.clone()));
        Evaluator::new(program.mesh).run(&[&program], &call).expect("it runs").remove(0)
    }

    #[test]
    fn every_line_of_a_softmax_sums_to_one() {
        let x = Tensor::from_fn(&[2, 3, 4], |i| (i * i % 7) as f64);
        let out = run(
            "%x = input : f32[2, 3, 4] %a = toperator.softmax %x %b = toperator.softmax %x {dim = 1}
             output \"a\", %a output \"b\", %b",
            &[("x", x)],
        );
        let sum = |t: &Tensor, start: usize, step: usize, n: usize| -> f64 {
            (0..n).map(|j| t.data()[start + j * step]).sum()
        };
        for line in 0..6 {
            assert!((sum(&out["a"], line * 4, 1, 4) - 1.0).abs() < 1e-15);
        }
        for line in 0..8 {
            assert!((sum(&out["b"], line / 4 * 12 + line % 4, 4, 3) - 1.0).abs() < 1e-15);
        }
        assert!((out["a"].data()[1] / out["a"].data()[0] - 1f64.exp()).abs() < 1e-12);
    }

    #[test]
    fn a_transposed_bmm_reads_columns_as_rows() {
        let (x, y) = (Tensor::from_fn(&[2, 1, 2], |i| i as f64), Tensor::from_fn(&[2, 2, 3], |i| i as f64));
        let t = Tensor::from_fn(&[2, 3, 2], |i| (i / 6 * 6 + i % 2 * 3 + i % 6 / 2) as f64);
        let out = run(
            "%x = input : f32[2, 1, 2] %y = input : f32[2, 2, 3] %t = input : f32[2, 3, 2]
             %a = toperator.bmm %x, %y {scale = 0.5} %b = toperator.bmm %x, %t {scale = 0.5, transposed = true}
             output \"a\", %a output \"b\", %b",
            &[("x", x), ("y", y), ("t", t)],
        );
        assert_eq!(out["a"].data(), [1.5, 2.0, 2.5, 19.5, 22.0, 24.5]);
        assert_eq!(out["a"], out["b"]);
    }

    #[test]
    fn an_expert_drops_what_is_beyond_its_capacity() {
        // Two experts, one doubling and one negating; every token prefers the first, and ties go to
        // the lower one.
        let (x, w) = (Tensor::new(&[3, 1], vec![1.0, 10.0, 100.0]), Tensor::new(&[2, 1, 1], vec![2.0, -1.0]));
        let g = Tensor::new(&[3, 2], vec![0.5, 0.5, 0.75, 0.25, 0.5, 0.25]);
        let body = |constants: &str| {
            format!(
                "buffer @w : f32[2, 1, 1] %x = input : f32[3, 1] %g = input : f32[3, 2] %w = input : f32[2, 1, 1]
                 cache.write @w, %w %y = toperator.moe_route %x, %g, @w {{a2a_axis = \"ep\", {constants}}}
                 output \"y\", %y"
            )
        };
        let y = |constants: &str| {
            let brought = [("x", x.clone()), ("g", g.clone()), ("w", w.clone())];
            run(&body(constants), &brought)["y"].data().to_vec()
        };
        // ⌈1 · 3 · 1 / 2⌉ = 2 tokens per expert: the third is dropped.
        assert_eq!(y("capacity_factor = 1, top_k = 1"), [1.0, 15.0, 0.0]);
        assert_eq!(y("capacity_factor = 1.5, pack_fused = true, top_k = 1"), [1.0, 15.0, 100.0]);
        assert_eq!(y("capacity_factor = 1"), [0.5, 12.5, 75.0]);
    }

    #[test]
    fn fused_and_unfused_packing_give_the_same_bits() {
        for (seed, tokens, experts, capacity, top_k) in
            [(1, 7, 3, "0.7", 2), (2, 5, 5, "1e30", 5), (3, 9, 2, "0.3", 1)]
        {
            let mut rng = tessera_base::random::Rng::new(seed, [0, 0]);
            let mut draw =
                |shape: &[usize]| Tensor::from_fn(shape, |_| f64::from(rng.next_u32()) / f64::from(u32::MAX));
            let given =
                [("x", draw(&[tokens, 3])), ("g", draw(&[tokens, experts])), ("w", draw(&[experts, 2, 3]))];
            let route = |name: &str, fused: bool| {
                format!(
                    "%{name} = toperator.moe_route %x, %g, @w {{a2a_axis = \"ep\", capacity_factor = {capacity}, \
                     pack_fused = {fused}, top_k = {top_k}}} output \"{name}\", %{name}\n"
                )
            };
            let out = run(
                &format!(
                    "buffer @w : f32[{experts}, 2, 3] %x = input : f32[{tokens}, 3] %g = input : f32[{tokens}, {experts}]
                     %w = input : f32[{experts}, 2, 3] cache.write @w, %w {}{}",
                    route("fused", true),
                    route("plain", false)
                ),
                &given,
            );
            assert_eq!(out["fused"], out["plain"], "seed {seed}");
            assert!(out["plain"].data().iter().any(|y| *y != 0.0));
        }
    }

    #[test]
    fn fp8_quantization_is_rejected() {
        let text = "program @p {
          buffer @w : f32[2, 1, 1] %x = input : f32[3, 1] %g = input : f32[3, 2]
          %y = toperator.moe_route %x, %g, @w
                 {a2a_axis = \"ep\", capacity_factor = 1, policy = \"fp8_e4m3\", quantize_fp8 = true}
        }";
        let program = tessera_ir::parse(text, "t").expect("well formed");
        let call = CallInputs::default()
            .with_input("x", Tensor::full(&[3, 1], 1.0))
            .with_input("g", Tensor::full(&[3, 2], 1.0));
        let fault = Evaluator::new(program.mesh).run(&[&program], &call).expect_err("no meaning");
        assert!(fault.to_string().contains("quantize_fp8 has no meaning in f64"), "{fault}");
    }
}

//! Compares the parameters that Rust declares for each kernel with the `__global__` functions of the
//! CUDA sources, as they are compiled. A wrong argument would otherwise show on a GPU alone, as wrong
//! numbers or corrupt memory.

use std::collections::BTreeMap;

use crate::attention_sm90;
use crate::collectives::COLLECTIVE_TABLE;
use crate::conv;
use crate::gemm::sm90::{self, EPILOGUES, GEMM_TABLE};
use crate::kernel_params::{Param, ParamType};
use crate::kernel_table::{ELEMENTWISE_TABLE, HEAD_TABLE, ROW_TABLE};
use crate::kernels::{elementwise_source, head_sources, row_sources};

/// A parameter of a `__global__` function.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SourceParam {
    name: String,
    /// The type's name without qualifiers.
    ty: String,
    is_pointer: bool,
}

/// A `__global__` function.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SourceKernel {
    name: String,
    params: Vec<SourceParam>,
}

type Declarations = Vec<(&'static str, Vec<Param>)>;

/// Returns a sentence for each difference between the declarations and a source.
fn find_differences(declared: &Declarations, source: &str) -> Vec<String> {
    let source = strip_comments(source);
    let kernels = parse_kernels(&source);
    let sizes = struct_sizes(&source);
    let mut out = Vec::new();
    for kernel in &kernels {
        match declared.iter().find(|(name, _)| *name == kernel.name) {
            None => out.push(format!("{} is not declared", kernel.name)),
            Some((_, params)) => out.extend(compare_params(kernel, params, &sizes)),
        }
    }
    let missing = declared.iter().filter(|(name, _)| kernels.iter().all(|k| k.name != *name));
    out.extend(missing.map(|(name, _)| format!("{name} is declared and has no source")));
    out
}

fn compare_params(kernel: &SourceKernel, declared: &[Param], sizes: &BTreeMap<String, usize>) -> Vec<String> {
    let name = &kernel.name;
    if kernel.params.len() != declared.len() {
        return vec![format!("{name} has {} parameters, declared {}", kernel.params.len(), declared.len())];
    }
    let mut out = Vec::new();
    for (there, here) in kernel.params.iter().zip(declared) {
        let at = format!("{name}, parameter {}", there.name);
        if there.name != here.name {
            out.push(format!("{at}: declared as {}", here.name));
        }
        let (is_same_type, bytes) = match here.ty {
            ParamType::Pointer(elements) => {
                (there.is_pointer && elements.contains(&there.ty.as_str()), Some(8))
            }
            ParamType::Value(ty) => (
                !there.is_pointer && there.ty == ty,
                value_bytes(&there.ty).or(sizes.get(&there.ty).copied()),
            ),
        };
        if !is_same_type {
            let star = if there.is_pointer { "*" } else { "" };
            out.push(format!("{at}: of type {}{star}, declared {:?}", there.ty, here.ty));
        } else if bytes != Some(here.bytes) {
            out.push(format!("{at}: of {bytes:?} bytes, declared {}", here.bytes));
        }
    }
    out
}

/// Returns the size of a type that is no struct of the source.
fn value_bytes(ty: &str) -> Option<usize> {
    match ty {
        "int" | "u32" | "float" => Some(4),
        "i64" | "u64" | "double" => Some(8),
        _ => None,
    }
}

fn strip_comments(source: &str) -> String {
    let without = |line: &str| line.split("//").next().unwrap_or_default().to_string();
    source.lines().map(without).collect::<Vec<String>>().join("\n")
}

/// Finds the `__global__` functions, also those that a macro defines.
fn parse_kernels(source: &str) -> Vec<SourceKernel> {
    let (plain, macros) = split_macros(source);
    let mut out = Vec::new();
    for (name, parameters, body) in macros.iter().filter(|(_, _, body)| body.contains("__global__")) {
        for line in plain.lines() {
            let Some(call) = line.trim().strip_prefix(&format!("{name}(")) else { continue };
            let arguments = split_list(call.trim_end_matches(')'));
            let words = parameters.iter().map(String::as_str).zip(arguments.iter().map(|a| a.trim()));
            out.extend(functions_of(&replace_words(body, &words.collect())));
        }
    }
    out.extend(functions_of(&plain));
    out
}

type Macro = (String, Vec<String>, String);

/// Separates the function-like macros, as (name, parameters, body), from the rest.
fn split_macros(source: &str) -> (String, Vec<Macro>) {
    let (mut plain, mut macros) = (String::new(), Vec::new());
    let joined = source.replace("\\\n", " ");
    for line in joined.lines() {
        match line.trim().strip_prefix("#define ").and_then(|d| d.split_once('(')) {
            Some((name, rest)) if !name.contains(' ') => {
                let (parameters, body) = rest.split_once(')').expect("a closed list of macro parameters");
                let parameters = split_list(parameters).iter().map(|p| p.trim().to_string()).collect();
                macros.push((name.to_string(), parameters, body.to_string()));
            }
            _ => plain += &format!("{line}\n"),
        }
    }
    (plain, macros)
}

fn replace_words(text: &str, words: &BTreeMap<&str, &str>) -> String {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut out = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| is_word(c) != is_word(first)).unwrap_or(rest.len());
        let (part, tail) = rest.split_at(end);
        out += words.get(part).copied().unwrap_or(part);
        rest = tail;
    }
    out
}

fn functions_of(source: &str) -> Vec<SourceKernel> {
    source.split("__global__").skip(1).map(parse_function).collect()
}

/// Parses a function behind `__global__`: attributes with their own parentheses, then `name(params)`.
fn parse_function(text: &str) -> SourceKernel {
    let mut rest = text;
    loop {
        let open = rest.find('(').expect("a list of parameters");
        let name = rest[..open].split_whitespace().last().expect("a name");
        let close = open + matching_parenthesis(&rest[open..]);
        if name.starts_with("__") {
            rest = &rest[close + 1..];
            continue;
        }
        let list = split_list(&rest[open + 1..close]);
        let params = list.iter().filter(|p| !p.trim().is_empty()).map(|p| parse_param(p)).collect();
        return SourceKernel { name: name.to_string(), params };
    }
}

fn matching_parenthesis(text: &str) -> usize {
    let mut depth = 0;
    for (i, c) in text.char_indices() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if depth == 0 {
            return i;
        }
    }
    panic!("an open parenthesis in {text:.80}")
}

fn split_list(list: &str) -> Vec<&str> {
    list.split(',').collect()
}

fn parse_param(text: &str) -> SourceParam {
    let spaced = text.replace('*', " * ");
    let words: Vec<&str> =
        spaced.split_whitespace().filter(|w| !matches!(*w, "const" | "__grid_constant__")).collect();
    match words[..] {
        [ty, name] => SourceParam { name: name.into(), ty: ty.into(), is_pointer: false },
        [ty, "*", name] => SourceParam { name: name.into(), ty: ty.into(), is_pointer: true },
        _ => panic!("a parameter that this parser does not know: {text}"),
    }
}

/// Computes the size of every struct whose fields are numbers, pointers, such structs, or arrays of
/// these.
fn struct_sizes(source: &str) -> BTreeMap<String, usize> {
    let mut layouts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for text in source.split("struct ").skip(1) {
        let Some((head, body)) = text.split_once('{') else { continue };
        let words: Vec<&str> = head.split_whitespace().collect();
        let Some(name) = words.last() else { continue };
        let align = head.strip_prefix("alignas(").and_then(|a| a.split_once(')')?.0.parse().ok());
        let fields = body.split("};").next().unwrap_or_default();
        if let Some((size, natural)) = struct_layout(fields, source, &layouts) {
            let align = align.unwrap_or(natural);
            layouts.insert(name.to_string(), (size.next_multiple_of(align), align));
        }
    }
    layouts.into_iter().map(|(name, (size, _))| (name, size)).collect()
}

/// Returns the end of the last field and the alignment; `None` for a field of unknown type. Functions
/// follow the fields.
fn struct_layout(
    fields: &str,
    source: &str,
    known: &BTreeMap<String, (usize, usize)>,
) -> Option<(usize, usize)> {
    let (mut end, mut align) = (0_usize, 1);
    for declaration in fields.split(';').map(str::trim).take_while(|d| !d.contains('(')) {
        if declaration.is_empty() {
            continue;
        }
        let (ty, names) = declaration.trim_start_matches("const ").split_once([' ', '*'])?;
        let is_pointer = declaration.contains('*');
        let (bytes, field_align) = match value_bytes(ty) {
            _ if is_pointer => (8, 8),
            Some(bytes) => (bytes, bytes),
            None => *known.get(ty)?,
        };
        for name in split_list(names) {
            let count =
                name.split_once('[').map_or(Some(1), |(_, n)| array_len(n.trim_end_matches(']'), source))?;
            end = end.next_multiple_of(field_align) + count * bytes;
        }
        align = align.max(field_align);
    }
    Some((end, align))
}

/// Returns an array's length, which is a number or a constant of the source.
fn array_len(text: &str, source: &str) -> Option<usize> {
    text.parse().ok().or_else(|| {
        let (_, rest) = source.split_once(&format!(" {text} = "))?;
        rest.split_once(';')?.0.parse().ok()
    })
}

fn declarations(tables: &[&[(&'static str, &[Param])]]) -> Declarations {
    tables.iter().flat_map(|t| t.iter()).map(|(name, params)| (*name, params.to_vec())).collect()
}

/// Every source as it is compiled, with its declarations.
fn all_sources() -> Vec<(String, Declarations)> {
    let mut out = vec![
        (elementwise_source(), declarations(&[ELEMENTWISE_TABLE])),
        (attention_sm90::kernel_source(), declarations(&[attention_sm90::ATTENTION_TABLE])),
        (include_str!("kernels/p2p_collectives.cu").to_string(), declarations(&[COLLECTIVE_TABLE])),
    ];
    let of_rows = row_sources().into_iter().map(|(source, kernels)| (source, kernels, ROW_TABLE));
    let of_heads = head_sources().into_iter().map(|(_, source, kernels)| (source, kernels, HEAD_TABLE));
    for (source, kernels, table) in of_rows.chain(of_heads) {
        let mut declared = declarations(&[table]);
        declared.retain(|(name, _)| kernels.contains(name));
        out.push((source, declared));
    }
    for tile in conv::tile_candidates() {
        out.push((tile.kernel_source(), declarations(&[conv::CONV_TABLE])));
    }
    for tile in EPILOGUES.into_iter().flat_map(sm90::tile_candidates) {
        out.push((tile.kernel_source(), declarations(&[GEMM_TABLE])));
    }
    out
}

#[test]
fn every_declared_parameter_is_that_of_the_kernel() {
    let mut kernels = 0;
    for (source, declared) in all_sources() {
        let found = find_differences(&declared, &source);
        assert!(found.is_empty(), "{found:#?}");
        kernels += declared.len();
    }
    // One kernel per tile of a GEMM or a convolution, and all others once.
    let tiles = EPILOGUES.into_iter().flat_map(sm90::tile_candidates).count() + conv::tile_candidates().len();
    let tables = [ELEMENTWISE_TABLE, ROW_TABLE, HEAD_TABLE, COLLECTIVE_TABLE];
    assert_eq!(kernels - tiles, tables.iter().map(|t| t.len()).sum::<usize>() + 1);
}

/// Applies a change to the declaration of a kernel and returns the differences.
fn differences_after(kernel: &str, change: impl Fn(&mut Vec<Param>)) -> Vec<String> {
    let (source, mut declared) = all_sources()
        .into_iter()
        .find(|(_, declared)| declared.iter().any(|(name, _)| *name == kernel))
        .expect("a declared kernel");
    declared.iter_mut().filter(|(name, _)| *name == kernel).for_each(|(_, params)| change(params));
    find_differences(&declared, &source)
}

#[test]
fn wrong_declarations_are_found() {
    assert!(differences_after("bias_act_f32", |_| ()).is_empty());
    // Two integers and two pointers in the wrong order, which no width tells apart.
    let swapped = differences_after("bias_act_f32", |p| p.swap(3, 4));
    assert_eq!(swapped.len(), 2, "{swapped:?}");
    assert!(swapped[0].contains("bias_act_f32, parameter columns: declared as act"), "{swapped:?}");
    assert_eq!(differences_after("rms_rope", |p| p.swap(13, 14)).len(), 2);
    // A missing and a superfluous argument.
    let missing = differences_after("softmax_bf16", |p| p.truncate(2));
    assert_eq!(missing, ["softmax_bf16 has 3 parameters, declared 2"]);
    assert_eq!(differences_after("spin", |p| p.push(Param::new::<i32>("n"))).len(), 1);
    // A wrong width, in a number and in a struct.
    let narrow = differences_after("add_bf16", |p| p[3] = Param::new::<i32>("n"));
    assert_eq!(narrow, ["add_bf16, parameter n: of type i64, declared Value(\"int\")"]);
    let short = differences_after("gemm", |p| p[9].bytes -= 8);
    assert_eq!(short, ["gemm, parameter redirected: of Some(32) bytes, declared 24"]);
    assert_eq!(differences_after("copy", |p| p[0].bytes += 4).len(), 1);
    // A wrong kind: an address, a number or a struct in place of another.
    assert_eq!(differences_after("mark", |p| p[0] = Param::new::<i64>("word")).len(), 1);
    assert_eq!(differences_after("attention", |p| p[9] = Param::new::<f32>("targets")).len(), 1);
    let elements = differences_after("modulation", |p| p[0].ty = ParamType::Pointer(&["bf16"]));
    assert_eq!(elements, ["modulation, parameter tables: of type float*, declared Pointer([\"bf16\"])"]);
}

#[test]
fn changed_sources_are_found() {
    let declared = declarations(&[COLLECTIVE_TABLE]);
    let source = include_str!("kernels/p2p_collectives.cu");
    let after = |from: &str, to: &str| {
        assert!(source.contains(from), "{from}");
        find_differences(&declared, &source.replace(from, to))
    };
    assert_eq!(after("mark(u32* word, u32 op)", "mark(u32 op, u32* word)").len(), 4);
    assert_eq!(after("REDUCE(tree_f32, F32, Tree)", ""), ["tree_f32 is declared and has no source"]);
    assert_eq!(after("REDUCE(sum_f32,", "REDUCE(mean_f32,").len(), 2);
    // A field that only one side has, in a struct within the argument.
    assert_eq!(after("u64 timeout_ns;", "u64 timeout_ns, more;").len(), 10);
}

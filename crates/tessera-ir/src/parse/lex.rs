//! Cuts IR text into tokens with byte positions. Text that is no token is kept as one, so that the parser can
//! point at it and go on.

use tessera_base::Span;
use winnow::ascii::{digit1, hex_digit1};
use winnow::combinator::{alt, delimited, opt, preceded, repeat};
use winnow::prelude::*;
use winnow::stream::LocatingSlice;
use winnow::token::{any, none_of, one_of, take_till, take_while};

/// One token.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Tok {
    /// A keyword, op name, axis, dtype or key.
    Word(String),
    /// `%name`, without the `%`.
    Value(String),
    /// `@name`, without the `@`.
    At(String),
    /// A whole number.
    Int(i64),
    /// A number with a point or an exponent, or written by its bits.
    Float(f64),
    /// A string, unescaped.
    Str(String),
    /// One of `{}()[],=:`.
    Punct(char),
    /// What cannot be read, and why.
    Bad(&'static str),
}

/// A token and where it stands.
#[derive(Debug, Clone)]
pub(super) struct Token {
    pub tok: Tok,
    pub span: Span,
    /// Whether it is the first of its line.
    pub first: bool,
}

/// All tokens of a text, in order.
pub(super) fn lex(text: &str) -> Vec<Token> {
    let mut input = LocatingSlice::new(text);
    let mut out = Vec::new();
    // The text itself begins a line.
    let mut first = true;
    loop {
        let Ok(blank) = blank.parse_next(&mut input) else { break };
        first |= blank.contains('\n');
        match token.with_span().parse_next(&mut input) {
            Ok((tok, at)) => out.push(Token { tok, span: Span { start: at.start, end: at.end }, first }),
            Err(_) => break,
        }
        first = false;
    }
    out
}

type Input<'a> = LocatingSlice<&'a str>;

/// White space and `//` comments.
fn blank<'a>(input: &mut Input<'a>) -> winnow::Result<&'a str> {
    let space = take_while(1.., char::is_whitespace).void();
    let comment = ("//", take_till(0.., '\n')).void();
    repeat::<_, _, (), _, _>(0.., alt((space, comment))).take().parse_next(input)
}

fn token(input: &mut Input<'_>) -> winnow::Result<Tok> {
    alt((bits, number, sigil, word, string, punct, any.value(Tok::Bad("this character means nothing here"))))
        .parse_next(input)
}

/// `f64:0x7ff8000000000000`: a number by its bits.
fn bits(input: &mut Input<'_>) -> winnow::Result<Tok> {
    preceded("f64:0x", hex_digit1)
        .map(|hex: &str| match u64::from_str_radix(hex, 16) {
            Ok(bits) => Tok::Float(f64::from_bits(bits)),
            Err(_) => Tok::Bad("a number by its bits has at most 16 hexadecimal digits"),
        })
        .parse_next(input)
}

fn number(input: &mut Input<'_>) -> winnow::Result<Tok> {
    let exponent = (one_of(['e', 'E']), opt(one_of(['+', '-'])), digit1).void();
    let whole =
        (opt('-'), digit1, opt(('.', digit1)).map(|p| p.is_some()), opt(exponent).map(|e| e.is_some()));
    (whole.with_taken(), take_while(0.., name_char))
        .map(|(((_, _, point, exponent), taken), tail): (((_, &str, bool, bool), &str), &str)| {
            if !tail.is_empty() {
                Tok::Bad("a number runs into a word")
            } else if !point && !exponent {
                taken.parse().map_or(Tok::Bad("a whole number beyond 64 bits"), Tok::Int)
            } else {
                match taken.parse::<f64>() {
                    Ok(x) if x.is_finite() => Tok::Float(x),
                    _ => Tok::Bad("a number beyond what 64 bits hold"),
                }
            }
        })
        .parse_next(input)
}

fn name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-')
}

fn sigil(input: &mut Input<'_>) -> winnow::Result<Tok> {
    (one_of(['%', '@']), take_while(0.., name_char))
        .map(|(sigil, name): (char, &str)| match (sigil, name) {
            (_, "") => Tok::Bad("a name must follow"),
            ('%', n) => Tok::Value(n.to_string()),
            (_, n) => Tok::At(n.to_string()),
        })
        .parse_next(input)
}

fn word(input: &mut Input<'_>) -> winnow::Result<Tok> {
    (one_of(|c: char| c.is_ascii_alphabetic() || c == '_'), take_while(0.., name_char))
        .take()
        .map(|w: &str| Tok::Word(w.to_string()))
        .parse_next(input)
}

fn string(input: &mut Input<'_>) -> winnow::Result<Tok> {
    let escape = preceded('\\', any).map(|c| match c {
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        other => other,
    });
    let body = repeat(0.., alt((none_of(['"', '\\', '\n']), escape))).fold(String::new, |mut s, c: char| {
        s.push(c);
        s
    });
    let open = ('"', take_till(0.., '\n')).value(Tok::Bad("a string that does not end on its line"));
    alt((delimited('"', body, '"').map(Tok::Str), open)).parse_next(input)
}

fn punct(input: &mut Input<'_>) -> winnow::Result<Tok> {
    one_of(['{', '}', '(', ')', '[', ']', ',', '=', ':']).map(Tok::Punct).parse_next(input)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toks(text: &str) -> Vec<Tok> {
        lex(text).into_iter().map(|t| t.tok).collect()
    }

    #[test]
    fn reads_every_kind() {
        assert_eq!(
            toks("%a = ttile.x @kv.0 \"s\\\"t\" -3 1e-6 f64:0x3ff0000000000000 // no\n{"),
            [
                Tok::Value("a".into()),
                Tok::Punct('='),
                Tok::Word("ttile.x".into()),
                Tok::At("kv.0".into()),
                Tok::Str("s\"t".into()),
                Tok::Int(-3),
                Tok::Float(1e-6),
                Tok::Float(1.0),
                Tok::Punct('{'),
            ]
        );
    }

    #[test]
    fn what_cannot_be_read_becomes_a_token() {
        for text in ["\"open", "%", "é", "12ab", "99999999999999999999", "1e999", "f64:0x11112222333344445"]
        {
            assert!(matches!(toks(text)[0], Tok::Bad(_)), "{text}");
        }
        // The line after an open string is read again.
        assert_eq!(toks("\"open\nx").len(), 2);
    }
}

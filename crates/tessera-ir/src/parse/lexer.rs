//! Lexer for IR text. Invalid text becomes a token of its own, so that the parser can report its
//! position and continue.

use tessera_base::Span;
use winnow::ascii::{digit1, hex_digit1};
use winnow::combinator::{alt, delimited, opt, preceded, repeat};
use winnow::prelude::*;
use winnow::stream::LocatingSlice;
use winnow::token::{any, none_of, one_of, take_till, take_while};

/// Kind and content of a token.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum TokenKind {
    /// A keyword, op name, axis, dtype or key.
    Word(String),
    /// `%name`, without the `%`.
    Value(String),
    /// `@name`, without the `@`.
    Symbol(String),
    /// An integer that fits in 64 signed bits.
    Int(i64),
    /// A number with a point or an exponent, or written as its bits.
    Float(f64),
    /// A string, unescaped.
    Str(String),
    /// One of `{}()[],=:`.
    Punct(char),
    /// Invalid text, with the reason.
    Bad(&'static str),
}

/// A token with its byte range. White space and comments give no token.
#[derive(Debug, Clone)]
pub(super) struct Token {
    pub kind: TokenKind,
    pub span: Span,
    /// Whether the token is the first on its line.
    pub starts_line: bool,
}

/// Splits a text into tokens without white space and comments. Invalid text gives
/// [`TokenKind::Bad`].
pub(super) fn tokenize(text: &str) -> Vec<Token> {
    let mut input = LocatingSlice::new(text);
    let mut out = Vec::new();
    // The start of the text is the start of a line.
    let mut first = true;
    loop {
        let Ok(blank) = skip_blank.parse_next(&mut input) else { break };
        first |= blank.contains('\n');
        match lex_token.with_span().parse_next(&mut input) {
            Ok((tok, at)) => {
                out.push(Token { kind: tok, span: Span { start: at.start, end: at.end }, starts_line: first })
            }
            Err(_) => break,
        }
        first = false;
    }
    out
}

type Input<'a> = LocatingSlice<&'a str>;

/// Matches white space and `//` comments.
fn skip_blank<'a>(input: &mut Input<'a>) -> winnow::Result<&'a str> {
    let space = take_while(1.., char::is_whitespace).void();
    let comment = ("//", take_till(0.., '\n')).void();
    repeat::<_, _, (), _, _>(0.., alt((space, comment))).take().parse_next(input)
}

fn lex_token(input: &mut Input<'_>) -> winnow::Result<TokenKind> {
    alt((
        lex_float_bits,
        lex_number,
        lex_sigil,
        lex_word,
        lex_string,
        lex_punct,
        any.value(TokenKind::Bad("this character is not allowed here")),
    ))
    .parse_next(input)
}

/// Parses `f64:0x7ff8000000000000`, a float written as its bits.
fn lex_float_bits(input: &mut Input<'_>) -> winnow::Result<TokenKind> {
    preceded("f64:0x", hex_digit1)
        .map(|hex: &str| match u64::from_str_radix(hex, 16) {
            Ok(bits) => TokenKind::Float(f64::from_bits(bits)),
            Err(_) => TokenKind::Bad("the bits of a number have at most 16 hexadecimal digits"),
        })
        .parse_next(input)
}

fn lex_number(input: &mut Input<'_>) -> winnow::Result<TokenKind> {
    let exponent = (one_of(['e', 'E']), opt(one_of(['+', '-'])), digit1).void();
    let whole =
        (opt('-'), digit1, opt(('.', digit1)).map(|p| p.is_some()), opt(exponent).map(|e| e.is_some()));
    (whole.with_taken(), take_while(0.., is_name_char))
        .map(|(((_, _, point, exponent), taken), tail): (((_, &str, bool, bool), &str), &str)| {
            if !tail.is_empty() {
                TokenKind::Bad("a number must not be followed directly by a letter")
            } else if !point && !exponent {
                taken.parse().map_or(TokenKind::Bad("the integer exceeds 64 bits"), TokenKind::Int)
            } else {
                match taken.parse::<f64>() {
                    Ok(x) if x.is_finite() => TokenKind::Float(x),
                    _ => TokenKind::Bad("the number exceeds the range of f64"),
                }
            }
        })
        .parse_next(input)
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-')
}

fn lex_sigil(input: &mut Input<'_>) -> winnow::Result<TokenKind> {
    (one_of(['%', '@']), take_while(0.., is_name_char))
        .map(|(sigil, name): (char, &str)| match (sigil, name) {
            (_, "") => TokenKind::Bad("a name must follow"),
            ('%', n) => TokenKind::Value(n.to_string()),
            (_, n) => TokenKind::Symbol(n.to_string()),
        })
        .parse_next(input)
}

fn lex_word(input: &mut Input<'_>) -> winnow::Result<TokenKind> {
    (one_of(|c: char| c.is_ascii_alphabetic() || c == '_'), take_while(0.., is_name_char))
        .take()
        .map(|w: &str| TokenKind::Word(w.to_string()))
        .parse_next(input)
}

fn lex_string(input: &mut Input<'_>) -> winnow::Result<TokenKind> {
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
    let open = ('"', take_till(0.., '\n')).value(TokenKind::Bad("the string is not closed on its line"));
    alt((delimited('"', body, '"').map(TokenKind::Str), open)).parse_next(input)
}

fn lex_punct(input: &mut Input<'_>) -> winnow::Result<TokenKind> {
    one_of(['{', '}', '(', ')', '[', ']', ',', '=', ':']).map(TokenKind::Punct).parse_next(input)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn toks(text: &str) -> Vec<TokenKind> {
        tokenize(text).into_iter().map(|t| t.kind).collect()
    }

    #[test]
    fn reads_every_kind() {
        assert_eq!(
            toks("%a = ttile.x @kv.0 \"s\\\"t\" -3 1e-6 f64:0x3ff0000000000000 // no\n{"),
            [
                TokenKind::Value("a".into()),
                TokenKind::Punct('='),
                TokenKind::Word("ttile.x".into()),
                TokenKind::Symbol("kv.0".into()),
                TokenKind::Str("s\"t".into()),
                TokenKind::Int(-3),
                TokenKind::Float(1e-6),
                TokenKind::Float(1.0),
                TokenKind::Punct('{'),
            ]
        );
    }

    #[test]
    fn invalid_text_becomes_a_token() {
        for text in ["\"open", "%", "é", "12ab", "99999999999999999999", "1e999", "f64:0x11112222333344445"]
        {
            assert!(matches!(toks(text)[0], TokenKind::Bad(_)), "{text}");
        }
        // The lexer continues on the line after an unclosed string.
        assert_eq!(toks("\"open\nx").len(), 2);
    }
}

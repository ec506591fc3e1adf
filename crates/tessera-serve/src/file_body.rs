//! A file as the body of a response, read piece by piece.

use axum::body::Bytes;
use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::fs::File;
use tokio::io::AsyncReadExt;

/// Bytes that are read at once.
const PIECE_BYTES: usize = 256 << 10;

/// Returns the bytes of a file from where it stands.
pub(crate) fn stream_file(file: File) -> impl Stream<Item = std::io::Result<Bytes>> {
    unfold(file, |mut file| async move {
        let mut piece = vec![0; PIECE_BYTES];
        match file.read(&mut piece).await {
            Ok(0) => None,
            Ok(count) => {
                piece.truncate(count);
                Some((Ok(piece.into()), file))
            }
            Err(e) => Some((Err(e), file)),
        }
    })
}

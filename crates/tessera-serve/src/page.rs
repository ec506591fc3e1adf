//! The page and its assets, which are part of the program: a browser requests nothing from elsewhere.

/// A file of the page.
#[derive(Debug)]
pub(crate) struct Asset {
    /// Path in the address.
    pub(crate) path: &'static str,
    pub(crate) content_type: &'static str,
    pub(crate) bytes: &'static [u8],
}

/// The files of the page.
pub(crate) const ASSETS: [Asset; 5] = [
    Asset {
        path: "/",
        content_type: "text/html; charset=utf-8",
        bytes: include_bytes!("../page/index.html"),
    },
    Asset {
        path: "/page.css",
        content_type: "text/css; charset=utf-8",
        bytes: include_bytes!("../page/page.css"),
    },
    Asset {
        path: "/page.js",
        content_type: "text/javascript; charset=utf-8",
        bytes: include_bytes!("../page/page.js"),
    },
    Asset {
        path: "/stream.js",
        content_type: "text/javascript; charset=utf-8",
        bytes: include_bytes!("../page/stream.js"),
    },
    Asset { path: "/icon.svg", content_type: "image/svg+xml", bytes: include_bytes!("../page/icon.svg") },
];

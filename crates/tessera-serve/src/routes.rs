//! The HTTP interface: the page, control, pictures, recordings, metrics and health. `openapi.json` describes it.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::json;
use tessera_base::Diagnostic;
use tessera_report::apng::png_frame;
use tokio::sync::Semaphore;

use crate::access::{AccessRules, TOKEN_COOKIE};
use crate::codes::{T1604, T1605, T1608, T1610};
use crate::file_body::stream_file;
use crate::page::{ASSETS, Asset};
use crate::protocol::{Change, MAX_CLIENT_MESSAGE_BYTES, Refusal, StreamState};
use crate::server_state::ServerState;
use crate::socket::serve_socket;

/// The description of the interface.
pub(crate) const OPENAPI: &str = include_str!("openapi.json");

/// Header with the secret of the client in control, for changes over HTTP.
const CLIENT_HEADER: &str = "tessera-client";

/// What all handlers share.
#[derive(Debug, Clone)]
pub(crate) struct Shared {
    pub(crate) server: Arc<ServerState>,
    pub(crate) rules: Arc<AccessRules>,
    /// Sockets that may be open.
    pub(crate) sockets: Arc<Semaphore>,
    pub(crate) is_tls: bool,
}

/// Returns the routes of a server.
pub(crate) fn router(shared: Shared) -> Router {
    let mut router = Router::new();
    for asset in &ASSETS {
        router = router.route(asset.path, get(async move || serve_asset(asset)));
    }
    router
        .route("/socket", get(open_socket))
        .route("/metrics", get(show_metrics))
        .route("/api/v1/openapi.json", get(async || typed("application/json", OPENAPI.as_bytes())))
        .route("/api/v1/status", get(show_status))
        .route("/api/v1/timeline", get(show_timeline))
        .route("/api/v1/alarms", get(show_alarms))
        .route("/api/v1/changes", post(request_change))
        .route("/api/v1/changes/{number}", get(show_change))
        .route("/api/v1/snapshot.png", get(show_png))
        .route("/api/v1/snapshot.jpg", get(show_jpeg))
        .route("/api/v1/recordings", get(list_recordings).post(start_recording))
        .route("/api/v1/recordings/current", delete(stop_recording))
        .route("/api/v1/recordings/{name}", get(download_recording))
        .layer(from_fn_with_state(shared.clone(), check_access))
        // Probes of a cluster name the server by any address, and state no token.
        .route("/healthz", get(check_health))
        .route("/readyz", get(check_readiness))
        .layer(DefaultBodyLimit::max(MAX_CLIENT_MESSAGE_BYTES))
        .layer(axum::middleware::map_response(add_headers))
        .with_state(shared)
}

/// Lets a request pass that the rules of access allow, and gives a browser that stated the token a cookie with it.
async fn check_access(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    if let Err(refusal) = shared.rules.check(request.uri(), request.headers()) {
        tracing::warn!(path = request.uri().path(), code = refusal.code, "{}", refusal.message);
        return refuse(StatusCode::FORBIDDEN, shared.server.count_refusal(refusal));
    }
    let query = request.uri().query().unwrap_or_default();
    let token = query.split('&').find_map(|pair| pair.strip_prefix("token=")).map(str::to_string);
    let mut response = next.run(request).await;
    if let Some(token) = token {
        let secure = if shared.is_tls { "; Secure" } else { "" };
        let cookie = format!("{TOKEN_COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict{secure}");
        if let Ok(cookie) = HeaderValue::from_str(&cookie) {
            response.headers_mut().insert(header::SET_COOKIE, cookie);
        }
    }
    response
}

/// Adds the headers that keep a browser from doing with a response what nobody meant.
async fn add_headers(mut response: Response) -> Response {
    const POLICY: &str = "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; frame-ancestors 'none'; \
                          base-uri 'none'; form-action 'none'";
    let headers = response.headers_mut();
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // The address may hold the token.
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}

fn serve_asset(asset: &'static Asset) -> Response {
    typed(asset.content_type, asset.bytes)
}

fn typed(content_type: &'static str, bytes: impl Into<Bytes>) -> Response {
    ([(header::CONTENT_TYPE, content_type)], bytes.into()).into_response()
}

fn refuse(status: StatusCode, refusal: Refusal) -> Response {
    (status, Json(refusal)).into_response()
}

fn refuse_with(shared: &Shared, status: StatusCode, d: &Diagnostic) -> Response {
    refuse(status, shared.server.count_refusal(Refusal::from_diagnostic(d)))
}

async fn open_socket(State(shared): State<Shared>, upgrade: WebSocketUpgrade) -> Response {
    let Ok(permit) = Arc::clone(&shared.sockets).try_acquire_owned() else {
        let full = Diagnostic::error(&T1605, "too many sockets are open").with_hint("close one, or wait");
        return refuse_with(&shared, StatusCode::SERVICE_UNAVAILABLE, &full);
    };
    let server = Arc::clone(&shared.server);
    let bytes = server.max_message_bytes();
    upgrade.max_message_size(bytes).max_frame_size(bytes).on_upgrade(move |socket| async move {
        serve_socket(socket, server).await;
        drop(permit);
    })
}

async fn show_metrics(State(shared): State<Shared>) -> Response {
    let text = shared.server.metrics.to_text();
    typed("application/openmetrics-text; version=1.0.0; charset=utf-8", text)
}

async fn show_status(State(shared): State<Shared>) -> Response {
    let Shared { server, .. } = &shared;
    Json(json!({ "stream": server.facts, "status": server.status() })).into_response()
}

async fn show_timeline(State(shared): State<Shared>) -> Response {
    Json(shared.server.timeline()).into_response()
}

async fn show_alarms(State(shared): State<Shared>) -> Response {
    Json(shared.server.alarms()).into_response()
}

/// The body of a change over HTTP.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChangeBody {
    change: Change,
}

async fn request_change(
    State(shared): State<Shared>,
    headers: HeaderMap,
    body: Json<ChangeBody>,
) -> Response {
    let secret = headers.get(CLIENT_HEADER).and_then(|value| value.to_str().ok());
    let client = match secret {
        None => None,
        Some(secret) => match shared.server.find_client(secret) {
            Some(client) => Some(client),
            None => {
                let unknown = Diagnostic::error(&T1604, "no client has this secret");
                return refuse_with(&shared, StatusCode::CONFLICT, &unknown);
            }
        },
    };
    let server = Arc::clone(&shared.server);
    let requested =
        tokio::task::spawn_blocking(move || server.request_change(client, None, &body.change)).await;
    match requested {
        Ok(Ok(change)) => (StatusCode::ACCEPTED, Json(json!({ "change": change }))).into_response(),
        Ok(Err(refusal)) => {
            let status = match refusal.code {
                code if code == T1604.id => StatusCode::CONFLICT,
                code if code == T1610.id => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::UNPROCESSABLE_ENTITY,
            };
            refuse(status, shared.server.count_refusal(refusal))
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn show_change(State(shared): State<Shared>, Path(number): Path<u64>) -> Response {
    match shared.server.outcome(number) {
        Some(outcome) => Json(outcome).into_response(),
        None => {
            (StatusCode::NOT_FOUND, Json(json!({ "change": number, "message": "no chunk has taken it yet" })))
                .into_response()
        }
    }
}

async fn show_png(State(shared): State<Shared>) -> Response {
    let Some(frame) = shared.server.latest_frame() else { return no_frame(&shared) };
    let header = *frame.header();
    let encoded = tokio::task::spawn_blocking(move || {
        png_frame(frame.rgb(), u32::from(header.width), u32::from(header.height))
    });
    match encoded.await {
        Ok(Ok(png)) => typed("image/png", png),
        Ok(Err(d)) => refuse_with(&shared, StatusCode::INTERNAL_SERVER_ERROR, &d),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn show_jpeg(State(shared): State<Shared>) -> Response {
    let Some(frame) = shared.server.latest_frame() else { return no_frame(&shared) };
    match tokio::task::spawn_blocking(move || frame.jpeg()).await {
        Ok(Some(jpeg)) => typed("image/jpeg", jpeg),
        _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn no_frame(shared: &Shared) -> Response {
    let none = Diagnostic::error(&T1610, "no frame was delivered yet");
    refuse_with(shared, StatusCode::SERVICE_UNAVAILABLE, &none)
}

async fn list_recordings(State(shared): State<Shared>) -> Response {
    Json(shared.server.with_recorder(|recorder| recorder.list())).into_response()
}

async fn start_recording(State(shared): State<Shared>) -> Response {
    match tokio::task::block_in_place(|| shared.server.with_recorder(|recorder| recorder.start())) {
        Ok(recording) => (StatusCode::CREATED, Json(recording)).into_response(),
        Err(d) => refuse_with(&shared, StatusCode::CONFLICT, &d),
    }
}

async fn stop_recording(State(shared): State<Shared>) -> Response {
    match tokio::task::block_in_place(|| shared.server.with_recorder(|recorder| recorder.stop())) {
        Ok(recording) => Json(recording).into_response(),
        Err(d) => refuse_with(&shared, StatusCode::CONFLICT, &d),
    }
}

async fn download_recording(State(shared): State<Shared>, Path(name): Path<String>) -> Response {
    let number = name.strip_suffix(".y4m").and_then(|number| number.parse().ok());
    let path =
        number.and_then(|number| shared.server.with_recorder(|recorder| recorder.finished_file(number)));
    let file = match path {
        Some(path) => tokio::fs::File::open(path).await.ok(),
        None => None,
    };
    let Some(file) = file else {
        let missing = Diagnostic::error(&T1608, format!("there is no finished recording {name:?}"));
        return refuse_with(&shared, StatusCode::NOT_FOUND, &missing);
    };
    let disposition = format!("attachment; filename=\"tessera-{name}\"");
    let headers =
        [(header::CONTENT_TYPE, "video/x-yuv4mpeg".to_string()), (header::CONTENT_DISPOSITION, disposition)];
    (headers, Body::from_stream(stream_file(file))).into_response()
}

/// The server answers.
async fn check_health() -> &'static str {
    "ok\n"
}

/// The stream delivers, or would if somebody watched.
async fn check_readiness(State(shared): State<Shared>) -> Response {
    let state = shared.server.status().state;
    let is_ready = match state {
        StreamState::Running | StreamState::Paused | StreamState::Idle | StreamState::WaitingForVideo => true,
        StreamState::Starting | StreamState::Restarting | StreamState::Ended => false,
    };
    let status = if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, format!("{}\n", state.name())).into_response()
}

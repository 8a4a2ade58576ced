//! The control interface: gRPC, described in `proto/hotspare/v1/control.proto`.
//!
//! Each agent listens on `/run/hotspare/PID.sock`, which only root can open, and with `--control`
//! for those who have a certificate. The commands that look at agents or steer them are its
//! clients.

mod ask;
mod commands;
pub mod proto;
mod service;

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hotspare_replica::Security;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::Server;

pub use self::ask::{Agent as Whom, connect};
pub use self::commands::{
    Where, columns, events, history, protection, rehearse, require_free_name, status, switchover,
};
use self::service::Service;
use crate::agent::Agent;

/// Where the sockets of this host's agents are.
const DIRECTORY: &str = "/run/hotspare";
/// What speaks below TLS, as ALPN names it.
const PROTOCOL: &[u8] = b"h2";
/// How long somebody may take to show a certificate …
const HANDSHAKE: Duration = Duration::from_secs(10);
/// … and how many may be about it at once.
const HANDSHAKES_MAX: usize = 32;
/// Requests of one caller that are answered at once.
const REQUESTS_MAX: usize = 32;
/// How often a caller on the network is asked whether it lives.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Answers for as long as the program lives, on the socket and at `tcp`.
pub fn serve(agent: &Agent, tcp: Option<TcpListener>) -> anyhow::Result<()> {
    std::fs::create_dir_all(DIRECTORY).with_context(|| format!("make {DIRECTORY}"))?;
    let path = PathBuf::from(format!("{DIRECTORY}/{}.sock", std::process::id()));
    // It gets its name when it listens: before, it would look as if left behind.
    let unnamed = path.with_extension("new");
    let _ = std::fs::remove_file(&unnamed);
    let socket = UnixListener::bind(&unnamed)
        .and_then(|listener| std::fs::rename(&unnamed, &path).map(|()| listener))
        .with_context(|| format!("listen on {}", path.display()))?;
    socket.set_nonblocking(true)?;
    let acceptor = match (&tcp, &agent.security) {
        (Some(_), Security::Tls(identity)) => {
            Some(TlsAcceptor::from(Arc::new(identity.server_for(PROTOCOL))))
        }
        (Some(_), Security::Plain { .. }) => anyhow::bail!(
            "--control needs --keys: over the network only those are answered who have a \
             certificate (`hotspare keys`); on this host there is {}",
            path.display()
        ),
        (None, _) => None,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("start the control interface")?;
    let service = proto::control_server::ControlServer::new(Service::new(agent.clone()));
    let answer = async move {
        if let (Some(listener), Some(acceptor)) = (tcp, acceptor) {
            let (to, callers) = mpsc::channel(1);
            tokio::spawn(accept(listener, acceptor, to));
            let server = Server::builder()
                .concurrency_limit_per_connection(REQUESTS_MAX)
                .http2_keepalive_interval(Some(KEEP_ALIVE));
            let mut server = server;
            let router = server.add_service(service.clone());
            tokio::spawn(router.serve_with_incoming(ReceiverStream::new(callers)));
        }
        let socket = tokio::net::UnixListener::from_std(socket)?;
        let mut server = Server::builder().concurrency_limit_per_connection(REQUESTS_MAX);
        let router = server.add_service(service);
        router.serve_with_incoming(UnixListenerStream::new(socket)).await?;
        anyhow::Ok(())
    };
    let reporter = agent.reporter.clone();
    let run = move || {
        if let Err(error) = runtime.block_on(answer) {
            reporter.alarm(&format!("the control interface has ended: {error:#}"));
        }
    };
    std::thread::Builder::new().name("control".into()).spawn(run)?;
    Ok(())
}

type Caller = std::io::Result<TlsStream<TcpStream>>;

/// Lets those in who have a certificate.
async fn accept(listener: TcpListener, acceptor: TlsAcceptor, to: mpsc::Sender<Caller>) {
    let ready = listener.set_nonblocking(true);
    let Ok(listener) = ready.and_then(|()| tokio::net::TcpListener::from_std(listener)) else {
        return;
    };
    let room = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    while let Ok(place) = room.clone().acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (acceptor, to) = (acceptor.clone(), to.clone());
        tokio::spawn(async move {
            // Strangers are told by TLS what they lack; nobody else is to hear of them.
            if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                let _ = to.send(Ok(stream)).await;
            }
            drop(place);
        });
    }
}

//! The caller's end.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hotspare_replica::Identity;
use hotspare_replica::keys::NODE_NAME;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::{Channel, Endpoint};

use super::PROTOCOL;
use super::proto::control_client::ControlClient;

/// How long an agent may take to answer what needs no waiting.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// An agent that can be asked.
#[derive(Clone)]
pub enum Agent {
    /// Of this host.
    Here(PathBuf),
    /// Of another, at HOST:PORT.
    There(String, Arc<Identity>),
}

/// A client of an agent.
pub type Client = ControlClient<Channel>;

/// Asks an agent something. An agent that is gone, or answers not at all, is an error; how long the
/// answer to a request may take is the caller's affair.
pub fn ask<T>(agent: &Agent, asking: impl AsyncFnOnce(Client) -> T) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let connected = tokio::time::timeout(PATIENCE, connect(agent)).await;
        let channel = connected.context("connect to the agent: no answer")??;
        Ok(asking(ControlClient::new(channel)).await)
    })
}

/// Connects to an agent.
pub async fn connect(agent: &Agent) -> anyhow::Result<Channel> {
    // Over the socket the name is not looked at.
    let endpoint = Endpoint::from_static("http://agent");
    let channel = match agent.clone() {
        Agent::Here(path) => {
            let dial = move |_| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            };
            endpoint.connect_with_connector(tower::service_fn(dial)).await
        }
        Agent::There(address, identity) => {
            let connector = TlsConnector::from(Arc::new(identity.client_for(PROTOCOL)));
            let dial = move |_| {
                let (address, connector) = (address.clone(), connector.clone());
                async move {
                    let stream = TcpStream::connect(address).await?;
                    let name = ServerName::try_from(NODE_NAME).map_err(io::Error::other)?;
                    connector.connect(name, stream).await.map(TokioIo::new)
                }
            };
            endpoint.connect_with_connector(tower::service_fn(dial)).await
        }
    };
    channel.map_err(|error| anyhow::anyhow!("connect to the agent: {}", root(&error)))
}

/// What is at the bottom of an error: the layers above say "transport error".
fn root(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(below) = deepest.source() {
        deepest = below;
    }
    deepest.to_string()
}

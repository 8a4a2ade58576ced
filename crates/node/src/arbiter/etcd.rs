//! A record in etcd, through its gRPC interface of version 3.
//!
//! Only what is needed of its messages is here (field numbers from etcd's `rpc.proto`, `kv.proto`):
//! a read, a transaction that compares `mod_revision`, a watch, and a login.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use http::uri::PathAndQuery;
use tokio_stream::StreamExt;
use tonic::client::Grpc;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::place::EtcdPlace;
use super::{Stored, Trouble, Version};

#[derive(Clone, PartialEq, prost::Message)]
struct RangeRequest {
    #[prost(bytes, tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct KeyValue {
    #[prost(bytes, tag = "1")]
    key: Vec<u8>,
    #[prost(int64, tag = "3")]
    mod_revision: i64,
    #[prost(bytes, tag = "5")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ResponseHeader {
    #[prost(int64, tag = "3")]
    revision: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    values: Vec<KeyValue>,
}

/// `Compare`: result EQUAL is 0, target MOD is 2.
#[derive(Clone, PartialEq, prost::Message)]
struct Compare {
    #[prost(int32, tag = "2")]
    target: i32,
    #[prost(bytes, tag = "3")]
    key: Vec<u8>,
    /// One of a group: it is sent even if it is 0.
    #[prost(int64, optional, tag = "6")]
    mod_revision: Option<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PutRequest {
    #[prost(bytes, tag = "1")]
    key: Vec<u8>,
    #[prost(bytes, tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RequestOp {
    #[prost(message, optional, tag = "2")]
    put: Option<PutRequest>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    header: Option<ResponseHeader>,
    #[prost(bool, tag = "2")]
    succeeded: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WatchCreateRequest {
    #[prost(bytes, tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    create: Option<WatchCreateRequest>,
}

/// `type` (1) is PUT (0) or DELETE (1).
#[derive(Clone, PartialEq, prost::Message)]
struct WatchEvent {
    #[prost(int32, tag = "1")]
    kind: i32,
    #[prost(message, optional, tag = "2")]
    value: Option<KeyValue>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct WatchResponse {
    #[prost(bool, tag = "4")]
    canceled: bool,
    #[prost(string, tag = "6")]
    reason: String,
    #[prost(message, repeated, tag = "11")]
    events: Vec<WatchEvent>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    password: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    token: String,
}

/// An etcd cluster.
pub struct Etcd {
    place: EtcdPlace,
    /// One for each address.
    channels: Vec<Channel>,
    /// The one that answered last, or is to be tried next.
    current: Cell<usize>,
    token: RefCell<Option<String>>,
}

impl Etcd {
    /// Does not connect yet.
    pub fn new(place: EtcdPlace, patience: Duration) -> anyhow::Result<Self> {
        use anyhow::Context;
        let read = |path: &str| std::fs::read(path).with_context(|| format!("read {path}"));
        let mut channels = Vec::new();
        for address in &place.addresses {
            let scheme = if place.tls { "https" } else { "http" };
            let mut endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
                .with_context(|| format!("--arbiter: {address:?} is no HOST:PORT"))?
                .connect_timeout(patience)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(Duration::from_secs(5))
                .keep_alive_timeout(Duration::from_secs(5))
                .keep_alive_while_idle(true);
            if place.tls {
                let mut tls = ClientTlsConfig::new();
                tls = match &place.ca {
                    Some(path) => tls.ca_certificate(Certificate::from_pem(read(path)?)),
                    None => tls.with_native_roots(),
                };
                if let (Some(certificate), Some(key)) = (&place.certificate, &place.key) {
                    tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
                }
                endpoint = endpoint.tls_config(tls).context("--arbiter: TLS")?;
            }
            channels.push(endpoint.connect_lazy());
        }
        Ok(Self { place, channels, current: Cell::new(0), token: RefCell::default() })
    }

    fn grpc(&self) -> Grpc<Channel> {
        Grpc::new(self.channels[self.current.get() % self.channels.len()].clone())
    }

    /// Another server may answer.
    pub fn try_another(&self) {
        self.current.set((self.current.get() + 1) % self.channels.len());
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = self.token.borrow().as_deref().and_then(|token| token.parse().ok()) {
            request.metadata_mut().insert("token", token);
        }
        request
    }

    async fn call<Q, A>(&self, path: &'static str, message: Q) -> Result<A, Trouble>
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + Default + 'static,
    {
        self.log_in().await?;
        match self.call_once(path, self.request(message.clone())).await {
            Err(status) if self.lost_login(&status) => {
                self.token.replace(None);
                self.log_in().await?;
                let again = self.call_once(path, self.request(message)).await;
                again.map_err(|status| self.trouble(&status))
            }
            answer => answer.map_err(|status| self.trouble(&status)),
        }
    }

    async fn call_once<Q, A>(&self, path: &'static str, request: Request<Q>) -> Result<A, Status>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = self.grpc();
        grpc.ready().await.map_err(|error| Status::unavailable(words(&error)))?;
        let codec = ProstCodec::<Q, A>::default();
        let answer = grpc.unary(request, PathAndQuery::from_static(path), codec).await?;
        Ok(answer.into_inner())
    }

    /// A token lasts until its server forgets it.
    fn lost_login(&self, status: &Status) -> bool {
        self.place.user.is_some()
            && (status.code() == Code::Unauthenticated
                || status.message().contains("invalid auth token"))
    }

    async fn log_in(&self) -> Result<(), Trouble> {
        let Some((name, password)) = &self.place.user else { return Ok(()) };
        if self.token.borrow().is_some() {
            return Ok(());
        }
        let (name, password) = (name.clone(), password.clone());
        let request = Request::new(AuthenticateRequest { name, password });
        let path = "/etcdserverpb.Auth/Authenticate";
        let answer: Result<AuthenticateResponse, Status> = self.call_once(path, request).await;
        let token = answer.map_err(|status| self.trouble(&status))?.token;
        self.token.replace(Some(token));
        Ok(())
    }

    /// What a status means, in words.
    fn trouble(&self, status: &Status) -> Trouble {
        let at = &self.place.addresses[self.current.get() % self.place.addresses.len()];
        let said = match std::error::Error::source(status) {
            Some(source) => format!("{}: {}", status.message(), words(source)),
            None => status.message().to_owned(),
        };
        let hint = match status.code() {
            Code::Unauthenticated | Code::PermissionDenied | Code::InvalidArgument => {
                "name and password of an etcd user who may read and write below the prefix are \
                 wanted: HOTSPARE_ARBITER_USER and HOTSPARE_ARBITER_PASSWORD"
            }
            // A server that wants another certificate may just hang up.
            _ if self.place.tls => {
                "is etcd up, and does TLS work: does `?ca=` name the authority that signed the \
                 server's certificate, is the address in that certificate, does the server want \
                 `&cert=` and `&key=`, and is the clock of this host right?"
            }
            _ => {
                "is etcd up, is the address right (client port, mostly 2379), does a firewall \
                 stand between, is it `etcds://` that the server wants?"
            }
        };
        let text = format!("etcd at {at}: {said} ({hint})");
        match status.code() {
            Code::Unauthenticated | Code::PermissionDenied | Code::InvalidArgument => {
                Trouble::Refused(text)
            }
            _ => Trouble::Unreachable(text),
        }
    }

    /// What is there now, as a majority has it.
    pub async fn read(&self, key: &str) -> Result<Option<Stored>, Trouble> {
        let request = RangeRequest { key: key.into() };
        let answer: RangeResponse = self.call("/etcdserverpb.KV/Range", request).await?;
        Ok(answer.values.into_iter().next().map(stored))
    }

    /// Replaces a version, `None` being that there is nothing. `None` if it is another by now.
    pub async fn swap(
        &self,
        key: &str,
        expected: Option<&Version>,
        bytes: Vec<u8>,
    ) -> Result<Option<Version>, Trouble> {
        let revision = expected.map_or(0, |version| version.0.parse().unwrap_or(-1));
        let compare = Compare { target: 2, key: key.into(), mod_revision: Some(revision) };
        let put = Some(PutRequest { key: key.into(), value: bytes });
        let request = TxnRequest { compare: vec![compare], success: vec![RequestOp { put }] };
        let answer: TxnResponse = self.call("/etcdserverpb.KV/Txn", request).await?;
        let revision = answer.header.map_or(0, |header| header.revision);
        Ok(answer.succeeded.then(|| Version(revision.to_string())))
    }

    /// Sees every change from now on.
    pub async fn watch(&self, key: &str) -> Result<EtcdWatch, Trouble> {
        self.log_in().await?;
        let create = Some(WatchCreateRequest { key: key.into() });
        let requests = tokio_stream::once(WatchRequest { create }).chain(tokio_stream::pending());
        let mut grpc = self.grpc();
        let ready = grpc.ready().await.map_err(|error| Status::unavailable(words(&error)));
        ready.map_err(|status| self.trouble(&status))?;
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let codec = ProstCodec::<WatchRequest, WatchResponse>::default();
        let answer = grpc.streaming(self.request(requests), path, codec).await;
        Ok(EtcdWatch(answer.map_err(|status| self.trouble(&status))?.into_inner()))
    }
}

/// Sees changes.
pub struct EtcdWatch(Streaming<WatchResponse>);

impl EtcdWatch {
    /// The next change; `None` when there was one that took the record away.
    pub async fn next(&mut self) -> Result<Option<Stored>, Trouble> {
        loop {
            let said = self.0.message().await;
            let said = said.map_err(|status| Trouble::Unreachable(status.message().to_owned()))?;
            let Some(said) = said.filter(|said| !said.canceled) else {
                return Err(Trouble::Unreachable("etcd has ended the watch".into()));
            };
            if let Some(last) = said.events.into_iter().next_back() {
                return Ok(last.value.filter(|_| last.kind == 0).map(stored));
            }
        }
    }
}

fn stored(value: KeyValue) -> Stored {
    Stored { version: Version(value.mod_revision.to_string()), bytes: value.value }
}

/// An error with its causes, of which the first words alone say little.
fn words(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

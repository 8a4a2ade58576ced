//! An agent that has in memory what it wrote to the store, asked by its control interface.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use hotspare_replica::Security;
use hotspare_store::{Address, Bucket, PackSource, Parts, StoreError, StoreResult};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tonic::{Code, Status};

use crate::control::proto::control_client::ControlClient;
use crate::control::proto::{PackPart, PagesRequest};
use crate::control::{Whom, connect};

type Client = ControlClient<tonic::transport::Channel>;

/// How long nothing may come of an agent that was asked. Somebody waits for these pages, and others
/// have them too.
const PATIENCE: Duration = Duration::from_secs(2);

/// Where else than in its store the memory of a guest can be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Elsewhere {
    /// A copy of the store.
    Copy(Address),
    /// An agent of another host: HOST:PORT.
    Agent(String),
    /// An agent of this host: its socket.
    Socket(PathBuf),
}

impl std::str::FromStr for Elsewhere {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains("://") {
            return text.parse().map(Self::Copy).map_err(|error: StoreError| error.to_string());
        }
        if text.starts_with('/') {
            return Ok(Self::Socket(text.into()));
        }
        match text.rsplit_once(':') {
            Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                Ok(Self::Agent(text.to_owned()))
            }
            _ => Err(format!(
                "{text:?}: write file:///DIR or s3://BUCKET/PREFIX for a copy of the store, or \
                 HOST:PORT for an agent that has `--control` there"
            )),
        }
    }
}

impl Elsewhere {
    /// Does not connect yet.
    pub fn open(&self, security: &Security) -> anyhow::Result<Box<dyn PackSource>> {
        let whom = match (self, security) {
            (Self::Copy(address), _) => return Ok(Box::new(Bucket::open(address)?)),
            (Self::Socket(path), _) => Whom::Here(path.clone()),
            (Self::Agent(address), Security::Tls(identity)) => {
                Whom::There(address.clone(), identity.clone())
            }
            (Self::Agent(address), Security::Plain { .. }) => anyhow::bail!(
                "--pages {address}: an agent of another host answers only who has a certificate: \
                 give --keys (`hotspare keys`)"
            ),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("start a runtime")?;
        Ok(Box::new(Peer { whom, runtime, client: Mutex::default() }))
    }
}

/// An agent that is asked for packs.
struct Peer {
    whom: Whom,
    runtime: Runtime,
    client: Mutex<Option<Client>>,
}

impl Peer {
    /// Connected, now or before.
    async fn client(&self) -> StoreResult<Client> {
        let known = self.client.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(client) = known {
            return Ok(client);
        }
        let connected = timeout(PATIENCE, connect(&self.whom)).await;
        let connected = connected.map_err(|_| self.gone("no answer"))?;
        let client = ControlClient::new(connected.map_err(|error| self.gone(error))?);
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = Some(client.clone());
        Ok(client)
    }

    fn gone(&self, why: impl std::fmt::Display) -> StoreError {
        StoreError::Unreachable(format!("{}: {why}", self.place()))
    }

    /// It is dialled anew next time.
    fn failed(&self, status: &Status) -> StoreError {
        if status.code() == Code::NotFound {
            return StoreError::Missing(status.message().to_owned());
        }
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.gone(match status.message() {
            "" => status.code().description(),
            message => message,
        })
    }

    async fn ask(&self, parts: Vec<PackPart>) -> StoreResult<Vec<Vec<u8>>> {
        let (mut client, count) = (self.client().await?, parts.len());
        let late = |_| self.failed(&Status::deadline_exceeded("no answer"));
        let asked = timeout(PATIENCE, client.pages(PagesRequest { parts })).await;
        let mut stream = asked.map_err(late)?.map_err(|status| self.failed(&status))?.into_inner();
        let mut found = Vec::new();
        while found.len() < count {
            let next = timeout(PATIENCE, stream.message()).await.map_err(late)?;
            let part = next.map_err(|status| self.failed(&status))?;
            found.push(part.ok_or_else(|| self.gone("it answers too little"))?.content);
        }
        Ok(found)
    }
}

impl PackSource for Peer {
    fn parts(&self, wanted: &[(String, Vec<Range<u64>>)]) -> StoreResult<Vec<Parts>> {
        let part = |(pack, range): (&String, &Range<u64>)| PackPart {
            pack: pack.clone(),
            offset: range.start,
            bytes: range.end - range.start,
        };
        let all = wanted.iter().flat_map(|(pack, ranges)| ranges.iter().map(move |r| (pack, r)));
        let found = self.runtime.block_on(self.ask(all.map(part).collect()))?;
        let mut found = found.into_iter();
        Ok(wanted.iter().map(|(_, ranges)| found.by_ref().take(ranges.len()).collect()).collect())
    }

    fn place(&self) -> String {
        match &self.whom {
            Whom::Here(path) => format!("the agent at {}", path.display()),
            Whom::There(address, _) => format!("the agent at {address}"),
        }
    }
}

/// All places that were named.
pub fn open_all(
    places: &[Elsewhere],
    security: &Security,
) -> anyhow::Result<Vec<Box<dyn PackSource>>> {
    places.iter().map(|place| place.open(security)).collect()
}

/// Room for what is written, if there is to be any.
pub fn memory(bytes: u64) -> Option<Arc<hotspare_store::PackMemory>> {
    (bytes > 0).then(|| Arc::new(hotspare_store::PackMemory::new(bytes)))
}

/// `512M`, `2G`, or a number of bytes.
pub fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].trim_end_matches('B').trim_end_matches('i') {
        "" => 1,
        "K" | "k" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => 0,
    };
    let number: Option<u64> = digits.parse().ok();
    let bytes = number.filter(|_| factor > 0).and_then(|number| number.checked_mul(factor));
    bytes.ok_or_else(|| format!("{text:?} is no size: write 512M or 2G"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_places_are_read_as_people_write_them() {
        assert_eq!((bytes("2G"), bytes("512MiB"), bytes("0")), (Ok(2 << 30), Ok(512 << 20), Ok(0)));
        assert!(["", "G", "1x", "-1", "99999999999999G"].iter().all(|text| bytes(text).is_err()));
        assert_eq!("10.0.0.1:9709".parse(), Ok(Elsewhere::Agent("10.0.0.1:9709".into())));
        assert_eq!("/run/x.sock".parse(), Ok(Elsewhere::Socket("/run/x.sock".into())));
        assert!(matches!("file:///srv".parse(), Ok(Elsewhere::Copy(_))));
        for wrong in ["", "host", ":1", "host:99999", "http://x/y"] {
            assert!(wrong.parse::<Elsewhere>().is_err(), "{wrong}");
        }
    }
}

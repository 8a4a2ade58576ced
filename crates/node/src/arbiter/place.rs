//! `--arbiter`, taken apart.

use std::str::FromStr;

use anyhow::bail;

/// Where the arbiter is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// There is none.
    None,
    /// A cluster of etcd.
    Etcd(EtcdPlace),
    /// A store that speaks S3.
    S3(S3Place),
}

/// `etcd://HOST:PORT[,HOST:PORT]…/PREFIX`.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdPlace {
    /// As HOST:PORT.
    pub addresses: Vec<String>,
    /// Of all keys.
    pub prefix: String,
    /// `etcds://`.
    pub tls: bool,
    /// File of the authority that signs the servers' certificates; else the system's are trusted.
    pub ca: Option<String>,
    /// Files of the client's own certificate and key.
    pub certificate: Option<String>,
    /// As [`EtcdPlace::certificate`].
    pub key: Option<String>,
    /// Name and password.
    pub user: Option<(String, String)>,
}

impl std::fmt::Debug for EtcdPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The password stays out of logs.
        f.debug_struct("EtcdPlace").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

/// `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Place {
    /// The bucket, which must be there.
    pub bucket: String,
    /// Of all keys.
    pub prefix: String,
    /// Where it is, if not at Amazon.
    pub endpoint: Option<String>,
    /// In which region.
    pub region: Option<String>,
}

impl Place {
    /// What must be the same on all hosts: they may reach it by different ways.
    pub fn identity(&self) -> Option<String> {
        match self {
            Place::None => None,
            Place::Etcd(place) => Some(format!("etcd:{}", place.prefix)),
            Place::S3(place) => Some(format!("s3:{}/{}", place.bucket, place.prefix)),
        }
    }
}

/// Name and value pairs after a `?`.
fn options<'a>(query: &'a str, known: &[&str]) -> anyhow::Result<Vec<(&'a str, String)>> {
    let mut found = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if !known.contains(&name) {
            bail!("--arbiter has an option {name:?}; there are {}", known.join(", "));
        }
        found.push((name, value.to_owned()));
    }
    Ok(found)
}

fn etcd(rest: &str, tls: bool) -> anyhow::Result<EtcdPlace> {
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (addresses, prefix) = place.split_once('/').unwrap_or((place, ""));
    if addresses.contains('@') {
        bail!(
            "--arbiter: name and password do not belong on a command line that everybody can see: \
             set HOTSPARE_ARBITER_USER and HOTSPARE_ARBITER_PASSWORD"
        );
    }
    let addresses: Vec<String> = addresses.split(',').map(str::to_owned).collect();
    if addresses.iter().any(|address| !address.contains(':')) {
        bail!("--arbiter: write etcd://HOST:PORT[,HOST:PORT]/PREFIX, the port mostly 2379");
    }
    let prefix = prefix.trim_matches('/').to_owned();
    if prefix.is_empty() {
        bail!("--arbiter: a prefix is missing, as in etcd://HOST:PORT/hotspare");
    }
    let options = options(query, &["ca", "cert", "key"])?;
    let option =
        |name| options.iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone());
    let (ca, certificate, key) = (option("ca"), option("cert"), option("key"));
    if !tls && !options.is_empty() {
        bail!("--arbiter: certificates are for etcds://");
    }
    if certificate.is_some() != key.is_some() {
        bail!("--arbiter: `cert=` and `key=` go together");
    }
    let given = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let user = given("HOTSPARE_ARBITER_USER")
        .map(|name| (name, given("HOTSPARE_ARBITER_PASSWORD").unwrap_or_default()));
    Ok(EtcdPlace { addresses, prefix, tls, ca, certificate, key, user })
}

fn s3(rest: &str) -> anyhow::Result<S3Place> {
    let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
    let (bucket, prefix) = (bucket.to_owned(), prefix.trim_matches('/').to_owned());
    if bucket.is_empty() || prefix.is_empty() {
        bail!("--arbiter: write s3://BUCKET/PREFIX");
    }
    let options = options(query, &["endpoint", "region"])?;
    let option =
        |name| options.iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone());
    Ok(S3Place { bucket, prefix, endpoint: option("endpoint"), region: option("region") })
}

impl FromStr for Place {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text.split_once("://") {
            None if text == "none" => Ok(Place::None),
            Some(("etcd", rest)) => Ok(Place::Etcd(etcd(rest, false)?)),
            Some(("etcds", rest)) => Ok(Place::Etcd(etcd(rest, true)?)),
            Some(("s3", rest)) => Ok(Place::S3(s3(rest)?)),
            _ => bail!(
                "--arbiter {text:?}: write etcd://HOST:PORT/PREFIX, etcds://…, s3://BUCKET/PREFIX \
                 or none"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_and_wrong_ones_explained() {
        let Ok(Place::Etcd(etcd)) = "etcds://a:2379,b:2379/x/y?ca=/ca.crt".parse() else {
            panic!()
        };
        assert_eq!((etcd.addresses.len(), &*etcd.prefix, etcd.tls), (2, "x/y", true));
        assert_eq!(etcd.ca.as_deref(), Some("/ca.crt"));
        let s3: Place = "s3://b/p?endpoint=http://127.0.0.1:5000&region=eu".parse().unwrap();
        assert_eq!(s3.identity().as_deref(), Some("s3:b/p"));
        assert_eq!("none".parse::<Place>().unwrap(), Place::None);
        for wrong in [
            "etcd://host/prefix",
            "etcd://host:2379",
            "etcd://u:p@host:2379/x",
            "etcd://host:2379/x?ca=/ca.crt",
            "etcds://host:2379/x?cert=/c",
            "s3://bucket",
            "s3://bucket/x?colour=red",
            "consul://x",
        ] {
            assert!(wrong.parse::<Place>().is_err(), "{wrong}");
        }
    }
}

//! Certificates: one small CA per installation, one certificate per host.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// The name in every host's certificate. Hosts are recognised by their CA, not by their address,
/// which may change.
pub const NODE_NAME: &str = "node.hotspare.internal";
const CA_NAME: &str = "Hotspare CA";
const CA_CERTIFICATE: &str = "ca.crt";
const CA_KEY: &str = "ca.key";

/// Why there are no usable keys.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// A file cannot be read or written.
    #[error("{action} {path}: {error}")]
    File {
        /// read, write or make.
        action: &'static str,
        /// Which.
        path: PathBuf,
        /// What the kernel says.
        error: io::Error,
    },
    /// The file is there but holds something else.
    #[error("{path} is not what `hotspare keys` writes: {why}")]
    Content {
        /// Which.
        path: PathBuf,
        /// In which way.
        why: String,
    },
    /// Making a certificate failed.
    #[error("make a certificate: {0}")]
    Make(#[from] rcgen::Error),
    /// The certificates do not fit together.
    #[error("the certificates in use do not fit together: {0}")]
    Unfit(String),
    /// A host's name would leave the directory.
    #[error("{0:?} is not a host's name: letters, digits, '-', '_' and '.' only")]
    Name(String),
}

/// What a host shows and what it accepts.
#[derive(Debug)]
pub struct Identity {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl Identity {
    /// Loads `ca.crt`, `NAME.crt` and `NAME.key` from `directory`, as [`issue`] left them there or
    /// as the operator copied them. The CA's key is not needed.
    pub fn load(directory: &Path, name: &str) -> Result<Identity, KeyError> {
        let read = |file: String| -> Result<(PathBuf, Vec<u8>), KeyError> {
            let path = directory.join(file);
            match fs::read(&path) {
                Ok(bytes) => Ok((path, bytes)),
                Err(error) => Err(KeyError::File { action: "read", path, error }),
            }
        };
        check_name(name)?;
        let (ca_path, ca) = read(CA_CERTIFICATE.into())?;
        let (own_path, own) = read(format!("{name}.crt"))?;
        let (key_path, key) = read(format!("{name}.key"))?;
        let content = |path, why: String| KeyError::Content { path, why };
        let ca = CertificateDer::from_pem_slice(&ca)
            .map_err(|error| content(ca_path, error.to_string()))?;
        let own = CertificateDer::from_pem_slice(&own)
            .map_err(|error| content(own_path, error.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(&key)
            .map_err(|error| content(key_path, error.to_string()))?;
        Identity::new(ca, own, key).map_err(|error| KeyError::Unfit(error.to_string()))
    }

    /// TLS of a server that speaks another protocol than the stream, as ALPN names it, to the same
    /// peers: those with a certificate of our authority.
    #[must_use]
    pub fn server_for(&self, protocol: &[u8]) -> ServerConfig {
        let mut config = ServerConfig::clone(&self.server);
        config.alpn_protocols = vec![protocol.to_vec()];
        config
    }

    /// As [`Identity::server_for`], of a client. The server's name is [`NODE_NAME`].
    #[must_use]
    pub fn client_for(&self, protocol: &[u8]) -> ClientConfig {
        let mut config = ClientConfig::clone(&self.client);
        config.alpn_protocols = vec![protocol.to_vec()];
        config
    }

    fn new(
        ca: CertificateDer<'static>,
        own: CertificateDer<'static>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Identity, rustls::Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(ca)?;
        let roots = Arc::new(roots);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![own.clone()], key.clone_key())?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![own], key)?;
        // Streams live long; resuming sessions would be one more way in.
        server.send_tls13_tickets = 0;
        Ok(Identity { client: Arc::new(client), server: Arc::new(server) })
    }
}

/// Issues a certificate to each of `names` into `directory` (mode 0700, keys 0600), making the CA
/// there first if there is none. Existing files are kept: a name that has a certificate is an
/// error. Gives the files written.
pub fn issue(directory: &Path, names: &[String]) -> Result<Vec<PathBuf>, KeyError> {
    names.iter().try_for_each(|name| check_name(name))?;
    let mut made = Vec::new();
    let make = |error| KeyError::File { action: "make", path: directory.into(), error };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(make)?;
    let ca_key_path = directory.join(CA_KEY);
    let ca_key = match fs::read_to_string(&ca_key_path) {
        Ok(pem) => KeyPair::from_pem(&pem).map_err(|error| KeyError::Content {
            path: ca_key_path.clone(),
            why: error.to_string(),
        })?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = KeyPair::generate()?;
            let certificate = ca_params()?.self_signed(&key)?;
            let path = directory.join(CA_CERTIFICATE);
            write_new(&path, certificate.pem().as_bytes(), 0o644)?;
            write_new(&ca_key_path, key.serialize_pem().as_bytes(), 0o600)?;
            made.extend([path, ca_key_path]);
            key
        }
        Err(error) => return Err(KeyError::File { action: "read", path: ca_key_path, error }),
    };
    let issuer = Issuer::new(ca_params()?, ca_key);
    for name in names {
        let key = KeyPair::generate()?;
        let certificate = node_params(name)?.signed_by(&key, &issuer)?;
        let paths = ["key", "crt"].map(|kind| directory.join(format!("{name}.{kind}")));
        write_new(&paths[0], key.serialize_pem().as_bytes(), 0o600)?;
        write_new(&paths[1], certificate.pem().as_bytes(), 0o644)?;
        made.extend(paths);
    }
    Ok(made)
}

fn check_name(name: &str) -> Result<(), KeyError> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let reserved = name == "ca" || name.starts_with('.');
    if name.is_empty() || reserved || !name.chars().all(allowed) {
        return Err(KeyError::Name(name.into()));
    }
    Ok(())
}

fn ca_params() -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, CA_NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn node_params(name: &str) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(vec![NODE_NAME.to_owned()])?;
    params.distinguished_name.push(DnType::CommonName, name);
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    Ok(params)
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> Result<(), KeyError> {
    let write = || {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|error| KeyError::File { action: "write", path: path.into(), error })
}

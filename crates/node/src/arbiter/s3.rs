//! A record as an object in a store that speaks S3, replaced by conditional puts.

use std::sync::Arc;

use anyhow::Context;
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload, RetryConfig, UpdateVersion,
};

use super::place::S3Place;
use super::{Stored, Trouble, Version};

/// A bucket.
pub struct S3 {
    store: Arc<AmazonS3>,
    bucket: String,
}

impl S3 {
    /// Does not connect yet. Keys come from the usual places: `AWS_ACCESS_KEY_ID` and
    /// `AWS_SECRET_ACCESS_KEY`, or the role of the machine.
    pub fn new(place: &S3Place) -> anyhow::Result<Self> {
        // Whoever was first has chosen the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&place.bucket)
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_client_options(ClientOptions::new().with_allow_http(true))
            // Attempts are repeated here, after a look at what has become of the last.
            .with_retry(RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: 0,
                retry_timeout: std::time::Duration::ZERO,
            });
        if let Some(endpoint) = &place.endpoint {
            builder = builder.with_endpoint(endpoint);
        }
        if let Some(region) = &place.region {
            builder = builder.with_region(region);
        }
        let store = builder.build().context("--arbiter: set up S3")?;
        Ok(Self { store: Arc::new(store), bucket: place.bucket.clone() })
    }

    fn trouble(&self, error: &Error) -> Trouble {
        let causes = std::iter::successors(Some(error as &dyn std::error::Error), |e| e.source());
        let said = causes.last().map(ToString::to_string).unwrap_or_default();
        let all = format!("{error:?}");
        let is_any = |words: &[&str]| words.iter().any(|word| all.contains(word));
        let bucket = &self.bucket;
        if is_any(&["NoSuchBucket"]) {
            return Trouble::Refused(format!(
                "S3: there is no bucket {bucket:?}: make it, or correct --arbiter"
            ));
        }
        if is_any(&["RequestTimeTooSkewed", "RequestExpired"]) {
            return Trouble::Refused(format!(
                "S3: the clock of this host is wrong by more than the store allows: set it ({said})"
            ));
        }
        if is_any(&["Unauthenticated", "PermissionDenied", "AccessDenied", "InvalidAccessKeyId"])
            || is_any(&["SignatureDoesNotMatch", "credential"])
        {
            return Trouble::Refused(format!(
                "S3: the store refuses these keys ({said}): AWS_ACCESS_KEY_ID and \
                 AWS_SECRET_ACCESS_KEY of somebody are wanted who may get and put below the prefix"
            ));
        }
        Trouble::Unreachable(format!(
            "S3, bucket {bucket:?}: {said} (is `endpoint=` right, does a firewall stand between?)"
        ))
    }

    /// What is there now.
    pub async fn read(&self, key: &str) -> Result<Option<Stored>, Trouble> {
        let found = match self.store.get(&Path::from(key)).await {
            Err(error) if is_missing_key(&error) => return Ok(None),
            found => found.map_err(|error| self.trouble(&error))?,
        };
        let tag = found.meta.e_tag.clone().ok_or_else(|| {
            Trouble::Refused("S3: the store gives no entity tags; it cannot be an arbiter".into())
        })?;
        let bytes = found.bytes().await.map_err(|error| self.trouble(&error))?;
        Ok(Some(Stored { version: Version(tag), bytes: bytes.to_vec() }))
    }

    /// Replaces a version, `None` being that there is nothing. `None` if it is another by now.
    pub async fn swap(
        &self,
        key: &str,
        expected: Option<&Version>,
        bytes: Vec<u8>,
    ) -> Result<Option<Version>, Trouble> {
        let mode = match expected {
            None => PutMode::Create,
            Some(version) => {
                PutMode::Update(UpdateVersion { e_tag: Some(version.0.clone()), version: None })
            }
        };
        let options = PutOptions { mode, ..PutOptions::default() };
        let put = self.store.put_opts(&Path::from(key), PutPayload::from(bytes), options).await;
        match put {
            Err(Error::Precondition { .. } | Error::AlreadyExists { .. }) => Ok(None),
            // What was to be replaced is gone.
            Err(error) if is_missing_key(&error) => Ok(None),
            Err(error) => Err(self.trouble(&error)),
            Ok(put) => put
                .e_tag
                .map(|tag| Some(Version(tag)))
                .ok_or_else(|| Trouble::Refused("S3: the store gives no entity tags".into())),
        }
    }

    /// Sees whether the store keeps the conditions of a put. One that ignores them would give the
    /// guest to everybody.
    pub async fn check(&self, probe: &str) -> Result<(), Trouble> {
        let ignores = |what: &str| {
            Trouble::Refused(format!(
                "S3: the store ignores `{what}` on a put: it cannot be an arbiter; take one that \
                 knows conditional writes, or etcd"
            ))
        };
        let written = self.swap(probe, None, b"1".to_vec()).await?;
        if written.is_some() && self.swap(probe, None, b"2".to_vec()).await?.is_some() {
            return Err(ignores("If-None-Match"));
        }
        let stale = Version("\"00000000000000000000000000000000\"".into());
        if self.swap(probe, Some(&stale), b"3".to_vec()).await?.is_some() {
            return Err(ignores("If-Match"));
        }
        Ok(())
    }
}

/// The object is not there; that the bucket is not is another matter.
fn is_missing_key(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. }) && !format!("{error:?}").contains("NoSuchBucket")
}

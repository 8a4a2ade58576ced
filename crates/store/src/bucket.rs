//! The place where objects are: a directory or a store that speaks S3.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    PutPayload, RetryConfig,
};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;
use tokio_stream::StreamExt;

use crate::error::{StoreError, StoreResult};

/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(30);
/// How long a request is repeated that fails for a reason that passes.
const RETRY: Duration = Duration::from_secs(5);

/// Requests under way at once, of one call: their round trips pass beside each other.
const AT_ONCE: usize = 64;

/// `--store`, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `file:///DIR`.
    Directory(PathBuf),
    /// `s3://BUCKET/PREFIX[?endpoint=URL&region=NAME]`.
    S3 {
        /// The bucket, which must be there.
        bucket: String,
        /// Of all names.
        prefix: String,
        /// Of a store that is not Amazon's.
        endpoint: Option<String>,
        /// As `us-east-1`.
        region: Option<String>,
    },
}

impl std::str::FromStr for Address {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        let wrong = |why: &str| StoreError::Address(format!("{text:?}: {why}"));
        if let Some(path) = text.strip_prefix("file://") {
            if !path.starts_with('/') {
                return Err(wrong("write file:///DIR, with the directory's whole path"));
            }
            return Ok(Self::Directory(path.into()));
        }
        let rest = text.strip_prefix("s3://");
        let rest = rest.ok_or_else(|| wrong("write file:///DIR or s3://BUCKET/PREFIX"))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let prefix = prefix.trim_matches('/').to_owned();
        if bucket.is_empty() || prefix.is_empty() {
            return Err(wrong("write s3://BUCKET/PREFIX"));
        }
        let (mut endpoint, mut region) = (None, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("endpoint", url)) => endpoint = Some(url.to_owned()),
                Some(("region", name)) => region = Some(name.to_owned()),
                _ => return Err(wrong("it may have endpoint=URL and region=NAME after `?`")),
            }
        }
        Ok(Self::S3 { bucket: bucket.to_owned(), prefix, endpoint, region })
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "file://{}", path.display()),
            Self::S3 { bucket, prefix, endpoint, region } => {
                write!(f, "s3://{bucket}/{prefix}")?;
                let endpoint = endpoint.iter().map(|url| format!("endpoint={url}"));
                let region = region.iter().map(|name| format!("region={name}"));
                let options: Vec<String> = endpoint.chain(region).collect();
                if options.is_empty() { Ok(()) } else { write!(f, "?{}", options.join("&")) }
            }
        }
    }
}

/// Requests that were made, which is what users of S3 pay for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Puts and lists.
    pub puts: u64,
    /// Gets and heads.
    pub gets: u64,
    /// Deletes, which cost nothing.
    pub deletes: u64,
}

/// What lies so close together comes by one request: less than a round trip brings.
pub(crate) const GAP_BYTES_MAX: u64 = 64 << 10;

/// Bytes of some ranges of an object.
pub type Parts = Vec<Vec<u8>>;

/// How many requests some ranges of an object are.
fn requests_for(ranges: &[Range<u64>]) -> u64 {
    let mut sorted: Vec<&Range<u64>> = ranges.iter().collect();
    sorted.sort_unstable_by_key(|range| range.start);
    let far = |pair: &[&Range<u64>]| pair[1].start.saturating_sub(pair[0].end) > GAP_BYTES_MAX;
    u64::from(!ranges.is_empty()) + sorted.windows(2).filter(|pair| far(pair)).count() as u64
}

/// Objects below a place, by name. Calls wait for the answer.
pub struct Bucket {
    objects: Arc<dyn ObjectStore>,
    prefix: Path,
    /// Of a directory: where it is.
    directory: Option<PathBuf>,
    runtime: Runtime,
    counted: std::sync::Mutex<Requests>,
    words: String,
}

impl std::fmt::Debug for Bucket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.words)
    }
}

/// An object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The last part of its name.
    pub name: String,
    /// Bytes.
    pub bytes: u64,
    /// How old it is, by the store's clock and ours.
    pub age: Duration,
}

impl Bucket {
    /// Does not connect yet; a directory is made if it is not there. Keys for S3 come from the
    /// usual places: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or the role of the machine.
    pub fn open(address: &Address) -> StoreResult<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(StoreError::local("start a runtime"))?;
        let set_up = |error: Error| StoreError::Address(format!("{address}: {error}"));
        let (objects, prefix, directory): (Arc<dyn ObjectStore>, _, _) = match address {
            Address::Directory(path) => {
                std::fs::create_dir_all(path).map_err(|error| {
                    StoreError::Unreachable(format!("make {}: {error}", path.display()))
                })?;
                let files = LocalFileSystem::new_with_prefix(path).map_err(set_up)?;
                (Arc::new(files), Path::default(), Some(path.clone()))
            }
            Address::S3 { bucket, prefix, endpoint, region } => {
                // Whoever was first has chosen the same.
                let _ = rustls::crypto::ring::default_provider().install_default();
                let options = ClientOptions::new().with_allow_http(true).with_timeout(REQUEST);
                let mut builder = AmazonS3Builder::from_env()
                    .with_bucket_name(bucket)
                    .with_conditional_put(S3ConditionalPut::ETagMatch)
                    .with_client_options(options)
                    .with_retry(RetryConfig {
                        backoff: BackoffConfig::default(),
                        max_retries: 3,
                        retry_timeout: RETRY,
                    });
                if let Some(endpoint) = endpoint {
                    builder = builder.with_endpoint(endpoint);
                }
                if let Some(region) = region {
                    builder = builder.with_region(region);
                }
                let store = builder.build().map_err(set_up)?;
                (Arc::new(store), Path::from(prefix.as_str()), None)
            }
        };
        let counted = std::sync::Mutex::default();
        Ok(Self { objects, prefix, directory, runtime, counted, words: address.to_string() })
    }

    fn path(&self, name: &str) -> Path {
        name.split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    fn count(&self, add: impl FnOnce(&mut Requests)) {
        add(&mut self.counted.lock().unwrap_or_else(std::sync::PoisonError::into_inner));
    }

    /// Requests so far.
    pub fn requests(&self) -> Requests {
        *self.counted.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Writes an object that nobody else writes.
    pub fn put(&self, name: &str, bytes: Vec<u8>) -> StoreResult<()> {
        self.write(name, bytes, PutMode::Overwrite).map(drop)
    }

    /// Writes an object, if there is none of this name; false if there is.
    pub fn create(&self, name: &str, bytes: Vec<u8>) -> StoreResult<bool> {
        self.write(name, bytes, PutMode::Create)
    }

    fn write(&self, name: &str, bytes: Vec<u8>, mode: PutMode) -> StoreResult<bool> {
        self.count(|requests| requests.puts += 1);
        let options = PutOptions { mode, ..PutOptions::default() };
        let path = self.path(name);
        let put = self.objects.put_opts(&path, PutPayload::from(bytes), options);
        match self.runtime.block_on(put) {
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => return Ok(false),
            other => other.map_err(|error| self.trouble(name, &error))?,
        };
        self.sync(&path).map_err(|error| {
            StoreError::Unreachable(format!("write {name} to the disk: {error}"))
        })?;
        Ok(true)
    }

    /// Of a directory: what was written outlives the host, and so does its name.
    fn sync(&self, path: &Path) -> std::io::Result<()> {
        let Some(directory) = &self.directory else { return Ok(()) };
        let file = directory.join(path.as_ref());
        std::fs::File::open(&file)?.sync_all()?;
        match file.parent() {
            Some(parent) => std::fs::File::open(parent)?.sync_all(),
            None => Ok(()),
        }
    }

    /// The whole object.
    pub fn get(&self, name: &str) -> StoreResult<Vec<u8>> {
        self.count(|requests| requests.gets += 1);
        let path = self.path(name);
        let got = self.runtime.block_on(async { self.objects.get(&path).await?.bytes().await });
        got.map(|bytes| bytes.to_vec()).map_err(|error| self.trouble(name, &error))
    }

    /// Several whole objects, some at a time.
    pub fn get_all(&self, names: &[String]) -> StoreResult<Vec<Vec<u8>>> {
        self.count(|requests| requests.gets += names.len() as u64);
        let mut all = Vec::new();
        for some in names.chunks(AT_ONCE) {
            let read = self.runtime.block_on(async {
                let mut reading = Vec::new();
                for name in some {
                    let (objects, path) = (Arc::clone(&self.objects), self.path(name));
                    let read = async move { objects.get(&path).await?.bytes().await };
                    reading.push(tokio::spawn(read));
                }
                let mut read = Vec::new();
                for one in reading {
                    read.push(one.await);
                }
                read
            });
            for (name, read) in some.iter().zip(read) {
                let read = read.map_err(|error| StoreError::Local(error.to_string()))?;
                all.push(read.map_err(|error| self.trouble(name, &error))?.to_vec());
            }
        }
        Ok(all)
    }

    /// Parts of several objects, all at a time; those that lie close together in an object come by
    /// one request.
    pub fn get_parts(&self, wanted: &[(String, Vec<Range<u64>>)]) -> StoreResult<Vec<Parts>> {
        let requests = wanted.iter().map(|(_, ranges)| requests_for(ranges)).sum::<u64>();
        self.count(|counted| counted.gets += requests);
        let got = self.runtime.block_on(async {
            let mut reading = Vec::new();
            let room = Arc::new(Semaphore::new(AT_ONCE));
            for (name, ranges) in wanted {
                let (objects, path) = (Arc::clone(&self.objects), self.path(name));
                let (ranges, local) = (ranges.clone(), self.directory.is_some());
                let room = room.clone();
                reading.push(tokio::spawn(async move {
                    // It is never closed; if it were, nobody would have to wait.
                    let _place = room.acquire().await;
                    if local {
                        return objects.get_ranges(&path, &ranges).await;
                    }
                    let get = |range| objects.get_range(&path, range);
                    object_store::coalesce_ranges(&ranges, get, GAP_BYTES_MAX).await
                }));
            }
            let mut got = Vec::new();
            for one in reading {
                got.push(one.await);
            }
            got
        });
        let mut parts = Vec::new();
        for ((name, ranges), got) in wanted.iter().zip(got) {
            let got = got.map_err(|error| StoreError::Local(error.to_string()))?;
            let got = got.map_err(|error| match &error {
                // Of an object that is shorter than it was.
                Error::Generic { .. } if self.length(name).is_ok_and(|is| is_short(is, ranges)) => {
                    let length = self.length(name).unwrap_or(0);
                    StoreError::damaged(name, length, "it ends here, and should not")
                }
                _ => self.trouble(name, &error),
            })?;
            for (range, bytes) in ranges.iter().zip(&got) {
                if bytes.len() as u64 != range.end - range.start {
                    let end = range.start + bytes.len() as u64;
                    return Err(StoreError::damaged(name, end, "it ends here, and should not"));
                }
            }
            parts.push(got.into_iter().map(|bytes| bytes.to_vec()).collect());
        }
        Ok(parts)
    }

    /// How long an object is.
    pub fn length(&self, name: &str) -> StoreResult<u64> {
        self.count(|requests| requests.gets += 1);
        let path = self.path(name);
        let head = self.runtime.block_on(self.objects.head(&path));
        head.map(|meta| meta.size).map_err(|error| self.trouble(name, &error))
    }

    /// Whether an object is there.
    pub fn is_there(&self, name: &str) -> StoreResult<bool> {
        match self.length(name) {
            Ok(_) => Ok(true),
            Err(StoreError::Missing(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What is directly in a folder, in the order of names.
    pub fn list(&self, folder: &str) -> StoreResult<Vec<Listed>> {
        let path = self.path(folder);
        let listing = async {
            let mut found = Vec::new();
            let mut stream = self.objects.list(Some(&path));
            while let Some(meta) = stream.next().await {
                found.push(meta?);
            }
            Ok(found)
        };
        let found = self.runtime.block_on(listing);
        let found = found.map_err(|error: Error| self.trouble(folder, &error))?;
        self.count(|requests| requests.puts += 1 + found.len() as u64 / 1000);
        let now = std::time::SystemTime::now();
        let listed = |meta: object_store::ObjectMeta| {
            let changed = std::time::SystemTime::from(meta.last_modified);
            Some(Listed {
                name: meta.location.filename()?.to_owned(),
                bytes: meta.size,
                age: now.duration_since(changed).unwrap_or_default(),
            })
        };
        let mut listed: Vec<Listed> = found.into_iter().filter_map(listed).collect();
        listed.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(listed)
    }

    /// Folders at the top.
    pub fn folders(&self) -> StoreResult<Vec<String>> {
        self.count(|requests| requests.puts += 1);
        let at = Some(&self.prefix);
        let found = self.runtime.block_on(self.objects.list_with_delimiter(at));
        let found = found.map_err(|error| self.trouble("the list of guests", &error))?;
        let mut folders: Vec<String> =
            found.common_prefixes.iter().filter_map(|p| Some(p.filename()?.to_owned())).collect();
        folders.sort();
        Ok(folders)
    }

    /// Deletes an object; one that is not there is gone.
    pub fn delete(&self, name: &str) -> StoreResult<()> {
        self.count(|requests| requests.deletes += 1);
        let path = self.path(name);
        match self.runtime.block_on(self.objects.delete(&path)) {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.trouble(name, &error)),
        }
    }

    fn trouble(&self, name: &str, error: &Error) -> StoreError {
        let causes = std::iter::successors(Some(error as &dyn std::error::Error), |e| e.source());
        let said = causes.last().map(ToString::to_string).unwrap_or_default();
        let all = format!("{error:?}");
        let is_any = |words: &[&str]| words.iter().any(|word| all.contains(word));
        let place = &self.words;
        if is_any(&["NoSuchBucket"]) {
            return StoreError::Refused(format!("{place}: there is no such bucket: make it"));
        }
        if matches!(error, Error::NotFound { .. }) {
            return StoreError::Missing(name.to_owned());
        }
        if is_any(&["RequestTimeTooSkewed", "RequestExpired"]) {
            return StoreError::Refused(format!("{place}: this host's clock is wrong ({said})"));
        }
        if is_any(&["Unauthenticated", "PermissionDenied", "AccessDenied", "InvalidAccessKeyId"])
            || is_any(&["SignatureDoesNotMatch", "credential"])
        {
            return StoreError::Refused(format!("{place}: no right to {name} ({said})"));
        }
        if is_any(&["StorageFull", "QuotaExceeded", "No space left"]) {
            return StoreError::Refused(format!("{place} is full: {name} was not written"));
        }
        StoreError::Unreachable(format!("{place}: {name}: {said}"))
    }
}

fn is_short(length: u64, ranges: &[Range<u64>]) -> bool {
    ranges.iter().any(|range| range.end > length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in [
            "file:///srv/checkpoints",
            "s3://bucket/prefix",
            "s3://bucket/a/b?endpoint=http://10.0.0.1:9000&region=eu-central-1",
        ] {
            let address: Address = text.parse().expect("an address");
            assert_eq!(address.to_string(), text);
        }
        for wrong in ["", "/srv", "file://srv", "s3://bucket", "s3:///x", "s3://b/p?x=1"] {
            assert!(wrong.parse::<Address>().is_err(), "{wrong}");
        }
    }
}

"""A bucket of moto, Amazon's protocol on the loopback, and the environment by which it is found."""

from contextlib import contextmanager

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}


class AmazonStore:
    """A running server with one bucket, `bucket`, and the method, path, query and range of each request."""

    def __init__(self, url, client):
        self.url = url
        self.client = client
        self.log = []

    @property
    def environment(self):
        return {**ENVIRONMENT, "AWS_ENDPOINT_URL": self.url}

    def names(self, prefix=""):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
        return sorted(one["Key"] for page in pages for one in page.get("Contents", ()))

    def read(self, name):
        return self.client.get_object(Bucket="bucket", Key=name)["Body"].read()

    def write(self, name, data):
        self.client.put_object(Bucket="bucket", Key=name, Body=data)

    def remove(self, *names):
        for name in names:
            self.client.delete_object(Bucket="bucket", Key=name)

    def upload(self, directory, prefix):
        for path in directory.rglob("*"):
            if path.is_file():
                self.write(f"{prefix}/{path.relative_to(directory)}", path.read_bytes())

    def download(self, prefix, directory):
        for name in self.names(f"{prefix}/"):
            path = directory / name.removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(name))
        return directory


@contextmanager
def amazon_store():
    """A running server."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1", **keys)
        client.create_bucket(Bucket="bucket")
        store = AmazonStore(url, client)
        _log_requests(server, store)
        yield store
    finally:
        server.stop()


def _log_requests(server, store):
    """Has a running server add its requests to the log of the store."""
    app = server._server.app

    def logging(environ, start_response):
        path, query, wanted = map(environ.get, ("PATH_INFO", "QUERY_STRING", "HTTP_RANGE"))
        store.log.append((environ["REQUEST_METHOD"], path, query, wanted))
        return app(environ, start_response)

    server._server.app = logging
